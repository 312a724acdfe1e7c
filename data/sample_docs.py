"""Make a small English corpus on the spot, without any network: the documentation inside a Python installation.

    python data/sample_docs.py                       # data/sample/docs_selected.jsonl and its sidecar manifest
    python data/sample_docs.py --max-mb 4 --out my/sample
    python data/sample_docs.py --source some/folder  # that folder instead of the installation

Text comes from docstrings and comment blocks of .py files (parsed, never imported), the language reference in
pydoc_data, and .rst/.md/.txt files and package descriptions. The same installation always gives the same bytes.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import json
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from shards import DOCS_NAME, SIDECAR_NAME, DataError, read_json, replacing, run_cli, sha256_file, write_json

MIN_DOC_CHARS, MAX_DOC_CHARS = 200, 20_000
MIN_COMMENT_CHARS = 160
MAX_FILE_BYTES = 2_000_000  # larger files are data or generated
DEDUP_PARAGRAPH_CHARS = 60  # shorter paragraphs ("See also:") repeat for good reasons
SHUFFLE_SEED = 1337
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "node_modules", "_vendor"}
SKIPPED_FILES = re.compile(
    r"(?i)^(licen[cs]e|copying|notice|authors|contributors|record|requirements|top_level|entry_points|sources)"
)
SAMPLE_SOURCE = "documentation of a Python installation; a sample for trying things out, not FineWeb"
TEXT_SUFFIXES = (".rst", ".md", ".txt")
COMMENT_BLOCK = re.compile(r"(?:^[ \t]*#.*\n){3,}", re.MULTILINE)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
COMMON_WORDS = set("a and are as be by for from if in is it not of on or that the this to with you".split())


# ---------------------------------------------------------------- from files to documents


def list_files(root: Path) -> list[str]:
    """Documentation files under root as relative POSIX paths, in an order that mixes the folders but never varies.

    The order is by hash of the path: a size limit then takes a little of every package and not only the letters a to c.
    """
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        for name in names:
            if name == "METADATA" or (name.endswith((".py", *TEXT_SUFFIXES)) and not SKIPPED_FILES.match(name)):
                found.append(Path(folder, name).relative_to(root).as_posix())
    return sorted(found, key=lambda path: (hashlib.sha256(path.encode("utf-8", "surrogateescape")).digest(), path))


def sections_of(path: Path, title: str) -> list[str]:
    """Pieces of text in one file, in reading order; none when it is no file, huge, not UTF-8 or not Python."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:  # reading a pipe would wait for ever
            return []
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    if path.name == "METADATA":  # the long description follows the headers
        return [text.partition("\n\n")[2]]
    if path.suffix != ".py":
        return [text]
    return docstring_sections(text, title) + comment_blocks(text)


def comment_blocks(text: str) -> list[str]:
    """Comments of at least MIN_COMMENT_CHARS that fill whole lines, without the number signs."""
    blocks = (re.sub(r"(?m)^[ \t]*#+!? ?", "", match) for match in COMMENT_BLOCK.findall(text))
    return [block for block in blocks if len(block) >= MIN_COMMENT_CHARS and looks_english(block)]


def docstring_sections(text: str, title: str) -> list[str]:
    """Docstrings of a module in source order under the names they document; the texts of a table of help topics."""
    if '"""' not in text and "'''" not in text:  # parsing is nine tenths of the time, so only where docstrings can be
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in other people's strings
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    sections = [*topic_texts(tree)]
    if docstring := ast.get_docstring(tree):
        sections.append(f"{title}\n\n{docstring}")
    stack: list[tuple[ast.AST, str]] = [(tree, "")]
    while stack:
        node, prefix = stack.pop()
        if isinstance(node, DEFINITIONS):
            name = prefix + node.name
            prefix = name + "."
            if docstring := ast.get_docstring(node):
                sections.append(f"{name}{signature(node)}\n\n{docstring}")
        body = getattr(node, "body", None)
        if isinstance(body, list):
            stack.extend((child, prefix) for child in reversed(body))
    return sections


def signature(node: ast.AST) -> str:
    """Argument names of a function as they would be called; nothing for a class."""
    if isinstance(node, ast.ClassDef):
        return ""
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return f"({', '.join(name for name in names if name not in ('self', 'cls'))})"


def topic_texts(tree: ast.Module) -> Iterator[str]:
    """Values of a module-level `topics = {name: text}`, as pydoc_data/topics.py has it."""
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Dict):
            continue
        if [getattr(target, "id", "") for target in node.targets] == ["topics"]:
            values = (getattr(value, "value", None) for value in node.value.values)
            yield from (inspect.cleandoc(value) for value in values if isinstance(value, str))


def clean(text: str) -> str:
    text = text.replace("\0", " ").replace("\r\n", "\n").expandtabs(4)
    lines = [line.rstrip() for line in text.split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def looks_english(text: str) -> bool:
    """Enough letters, and enough of the commonest English words, to be prose rather than a table or a word list."""
    letters = len(re.sub(r"[^a-zA-Z ]+", "", text))
    words = re.findall(r"[a-z]+", text.lower())
    common = sum(word in COMMON_WORDS for word in words)
    return letters >= 0.7 * len(text) and common >= 0.08 * len(words)


class Deduplicator:
    """Drops paragraphs seen before anywhere, so that no validation text is also training text word for word."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()

    def keep_new(self, text: str) -> str:
        return "\n\n".join(paragraph for paragraph in text.split("\n\n") if self._is_new(paragraph))

    def _is_new(self, paragraph: str) -> bool:
        normal = " ".join(paragraph.split())
        if len(normal) < DEDUP_PARAGRAPH_CHARS:
            return True
        digest = hashlib.blake2b(normal.encode("utf-8", "surrogatepass"), digest_size=12).digest()
        if digest in self.seen:
            return False
        self.seen.add(digest)
        return True


def pack(sections: list[str]) -> Iterator[str]:
    """Join the sections of one file into documents of about MAX_DOC_CHARS at most, cut between paragraphs."""
    document = ""
    for section in sections:
        for paragraph in section.split("\n\n"):
            if document and len(document) + len(paragraph) + 2 > MAX_DOC_CHARS:
                yield document
                document = ""
            document = f"{document}\n\n{paragraph}" if document else paragraph
    if document:
        yield document


def documents_of(root: Path, deduplicator: Deduplicator) -> Iterator[str]:
    """Cleaned documents of all files under root; stops when the caller stops asking."""
    for relative in list_files(root):
        title = relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        sections = [deduplicator.keep_new(clean(section)) for section in sections_of(root / relative, title)]
        for document in pack([section for section in sections if section]):
            document = clean(document)
            if len(document) >= MIN_DOC_CHARS and looks_english(document) and is_encodable(document):
                yield document


def is_encodable(text: str) -> bool:
    """False for lone surrogates, which some docstrings hold and UTF-8 does not."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


# ---------------------------------------------------------------- the corpus


def installation_roots() -> list[Path]:
    """The standard library, then the folders of installed packages."""
    paths = sysconfig.get_paths()
    roots = [Path(paths[key]).resolve() for key in ("stdlib", "purelib", "platlib")]
    return [root for root in dict.fromkeys(roots) if root.is_dir()]


def collect(roots: list[Path], max_bytes: float) -> list[str]:
    """Documents from the roots in order until their text reaches max_bytes."""
    documents, total, deduplicator = [], 0, Deduplicator()
    for root in roots:
        for document in documents_of(root, deduplicator):
            size = len(document.encode("utf-8"))
            if total + size > max_bytes:
                return documents
            documents.append(document)
            total += size
    return documents


def shuffle(documents: list[str]) -> list[str]:
    """Order by hash of seed and text: random, independent of the Python version, and a new document moves no other."""
    return sorted(documents, key=lambda text: hashlib.sha256(f"{SHUFFLE_SEED}\n{text}".encode()).digest())


def check_replaceable(folder: Path) -> None:
    """DataError when the folder holds documents that are no sample, such as a download's."""
    path, sidecar = folder / DOCS_NAME, folder / SIDECAR_NAME
    if sidecar.exists() and read_json(sidecar).get("source") == SAMPLE_SOURCE:
        return
    for found in (path, sidecar):
        if found.exists():
            raise DataError(f"{found} is not of a sample and would be replaced; give another --out, or move it away")


def write_corpus(folder: Path, documents: list[str], val_docs: int) -> dict:
    """Write docs_selected.jsonl and its sidecar into folder; returns the sidecar."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / DOCS_NAME
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        for document in documents:
            file.write(json.dumps({"text": document}, ensure_ascii=False) + "\n")
    sidecar = {
        "num_docs": len(documents),
        "docs_val": val_docs,
        "docs_sha256": sha256_file(path),
        "shuffle_seed": SHUFFLE_SEED,
        "bytes": path.stat().st_size,
        "text_bytes": sum(len(document.encode("utf-8")) for document in documents),
        "val_text_bytes": sum(len(document.encode("utf-8")) for document in documents[:val_docs]),
        "source": SAMPLE_SOURCE,
    }
    write_json(folder / SIDECAR_NAME, sidecar)
    return sidecar


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).resolve().parent / "sample", help="folder to write into"
    )
    parser.add_argument(
        "--max-mb", type=float, default=12.0, help="stop at this much text, in 10^6 bytes (default %(default)s)"
    )
    parser.add_argument(
        "--val-docs", type=int, default=50, help="documents of the validation split (default %(default)s)"
    )
    parser.add_argument(
        "--source", type=Path, action="append", help="read this folder instead of the installation; repeatable"
    )
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    roots = args.source or installation_roots()
    for root in roots:
        if not root.is_dir():
            raise DataError(f"--source {root} is not a folder; name one that holds .py, .rst, .md or .txt files")
    if not args.max_mb > 0 or args.val_docs < 1:  # which no nan is
        raise DataError(f"--max-mb {args.max_mb} and --val-docs {args.val_docs} must both be positive numbers")
    check_replaceable(args.out)
    documents = shuffle(collect(roots, args.max_mb * 1e6))
    if len(documents) <= args.val_docs:
        raise DataError(
            f"only {len(documents)} documents found, too few for --val-docs {args.val_docs} and a training split; "
            "lower --val-docs, raise --max-mb or add a --source"
        )
    sidecar = write_corpus(args.out, documents, args.val_docs)
    print(
        f"{args.out / DOCS_NAME}: {sidecar['num_docs']:,} documents, {sidecar['text_bytes'] / 1e6:.2f} MB of text, "
        f"the first {args.val_docs} ({sidecar['val_text_bytes'] / 1e3:.0f} kB) for validation"
    )


if __name__ == "__main__":
    run_cli(main)
