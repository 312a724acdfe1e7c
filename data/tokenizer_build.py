"""Tokenizers: their specs, training them with SentencePiece, and writing their files."""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import caseops
import shards
from shards import DataError

if TYPE_CHECKING:
    import sentencepiece as spm
    from documents import Documents

TRAINER_THREADS = 2  # fixed, because the model file records it and must not depend on the machine
MIN_TRAINED_SHARE = 0.95
TRAINER_MEMORY_FACTOR = 5  # peak memory of tokenizer training per byte of text, measured on 9 and 74 MB
RESERVED_CHARACTERS = {"\0": " ", "\u2585": " "}  # SentencePiece would drop every line that holds U+2585
RECIPE_SETTINGS = {
    "model_type": "bpe", "byte_fallback": True, "character_coverage": 0.999, "add_dummy_prefix": False,
    "split_digits": True, "normalization_rule_name": "nmt_nfkc", "max_sentence_length": 4192,
    "hard_vocab_limit": False, "num_threads": TRAINER_THREADS, "minloglevel": 2,
    "pad_id": shards.PAD_ID, "bos_id": shards.BOS_ID, "eos_id": shards.EOS_ID, "unk_id": shards.UNK_ID,
}  # fmt: skip
RANGES = {"character_coverage": (0.98, 1.0), "max_sentence_length": (10, 1 << 30), "max_sentencepiece_length": (1, 512)}
CHOICES = {
    "normalization_rule_name": ("nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf", "identity"),
    **dict.fromkeys("split_digits split_by_number split_by_unicode_script".split(), (False, True)),
}  # of what a spec may override, with SentencePiece's own bounds


# ---------------------------------------------------------------- tokenizer specs


@dataclass(frozen=True)
class TokenizerSpec:
    """One tokenizer to build; `trainer` overrides single SentencePiece settings, `reuse` names a finished model.

    `transform` "caseops": the tokenizer sees normalised text with its case moved into marker pieces (caseops.py).
    """

    name: str
    kind: str
    vocab_size: int
    train_docs: int = 5_000_000
    trainer: dict = field(default_factory=dict)
    transform: str | None = None
    reuse: Path | None = None

    def __post_init__(self) -> None:
        largest = shards.MAX_VOCAB_SIZE
        if not isinstance(self.name, str) or not self.name.strip() or not self.name.isprintable():
            raise DataError(f"tokenizer {self.name!a}: the name must be a text of printable characters, in quotes")
        if self.kind not in ("sentencepiece", "byte"):
            raise self.error(f"kind {self.kind!r} is not one of 'sentencepiece', 'byte'")
        if type(self.vocab_size) is not int or not 1 <= self.vocab_size <= largest:
            raise self.error(f"vocab_size {self.vocab_size} must be from 1 to {largest} (ids are uint16)")
        if self.kind == "byte" and self.vocab_size != 260:
            raise self.error(f"vocab_size {self.vocab_size}, but a byte tokenizer has 260: 4 special ids and 256 bytes")
        if type(self.train_docs) is not int or self.train_docs < 1:
            raise self.error(f"train_docs {self.train_docs} must be a positive number of documents")
        if self.transform not in (None, "caseops") or (self.transform and self.kind == "byte"):
            raise self.error(f"transform {self.transform!r}: only 'caseops' exists, and only for kind 'sentencepiece'")
        if not isinstance(self.trainer, dict) or set(self.trainer) - {*RANGES, *CHOICES}:
            raise self.error(f"trainer {self.trainer}: only these can be overridden: {sorted({*RANGES, *CHOICES})}")
        for name, value in self.trainer.items():
            self.check_setting(name, value)
        rule = RECIPE_SETTINGS["normalization_rule_name"]
        if self.transform and self.normalization != rule:  # one that folds case would do so unmarked
            raise self.error(f"normalization_rule_name {self.normalization!r}: a transform needs {rule!r}; omit it")

    def check_setting(self, name: str, value: object) -> None:
        if name in CHOICES:
            if value not in CHOICES[name]:
                raise self.error(f"{name} {value!r:.80} must be one of {CHOICES[name]}")
            return
        low, high = RANGES[name]
        if type(value) not in (int, type(low)) or not low <= value <= high:
            raise self.error(f"{name} {value!r:.80} must be a number from {low} to {high}")

    def error(self, problem: str) -> DataError:
        return DataError(f"tokenizer {self.name}: {problem}")

    @property
    def variant(self) -> str:
        suffix = f"_{self.transform}" if self.transform else ""
        return "byte260" if self.kind == "byte" else f"sp{self.vocab_size}{suffix}"

    @property
    def dataset_name(self) -> str:
        return f"fineweb10B_{self.variant}"

    @property
    def path(self) -> str:
        """Of the tokenizer's file in the data folder."""
        suffix = f"_{self.transform}" if self.transform else ""
        name = "pure_byte_260.json" if self.kind == "byte" else f"{self.vocab_size}_bpe{suffix}.model"
        return f"tokenizers/fineweb_{name}"

    @property
    def normalization(self) -> str:
        return {**RECIPE_SETTINGS, **self.trainer}["normalization_rule_name"]

    def as_manifest(self) -> dict:
        return {key: value for key, value in asdict(self).items() if key != "reuse"}


def load_specs(path: Path, reuse: list[str], byte260: bool, skip_byte: bool = False) -> list[TokenizerSpec]:
    """Specs of the JSON file at path, with --reuse-sp-model, --byte260 and --skip-byte applied."""
    entries = shards.read_json(path).get("tokenizers")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DataError(f'{path}: expected {{"tokenizers": [{{"name": ..., "kind": ..., "vocab_size": ...}}, ...]}}')
    models = dict(parsed := [parse_reuse(item) for item in reuse])
    if len(models) < len(parsed):
        raise DataError(f"--reuse-sp-model {reuse}: two models of one variant; give one")
    specs = [make_spec(entry, models, path) for entry in entries]
    if byte260 and not any(spec.kind == "byte" for spec in specs):
        specs.append(TokenizerSpec("pure_byte_260", "byte", 260))
    if skip_byte:
        specs = [spec for spec in specs if spec.kind != "byte"]
    if unused := sorted(set(models) - {spec.variant for spec in specs if spec.reuse}):
        raise DataError(
            f"--reuse-sp-model {unused[0].removeprefix('sp')}: {path} has no such SentencePiece tokenizer; "
            f"it has {[spec.name for spec in specs]}"
        )
    names, variants = [spec.name for spec in specs], [spec.variant for spec in specs]
    if not specs or len(set(variants)) < len(variants):
        raise DataError(f"{path}: variants {variants}; list at least one tokenizer and each variant once")
    if len(set(names)) < len(names):
        raise DataError(f"{path}: names {names}; give each tokenizer a name of its own")
    return specs


def make_spec(entry: dict, models: dict[str, Path], path: Path) -> TokenizerSpec:
    known = {item.name for item in fields(TokenizerSpec)} - {"reuse"}
    if unknown := sorted(set(entry) - known):
        raise DataError(f"{path}: tokenizer {entry.get('name')!r}: {unknown} are not settings; known: {sorted(known)}")
    if missing := sorted({"name", "kind", "vocab_size"} - set(entry)):
        raise DataError(f"{path}: tokenizer {entry.get('name')!r} lacks {missing}; add them")
    spec = TokenizerSpec(**entry)
    return replace(spec, reuse=models.get(spec.variant))


def parse_reuse(item: str) -> tuple[str, Path]:
    """Variant and path of a --reuse-sp-model V=PATH; V is a vocabulary size or a variant such as sp8192_caseops."""
    variant, _, path = item.partition("=")
    if not variant or not Path(path).is_file():
        raise DataError(
            f"--reuse-sp-model {item!r}: expected V=PATH with the path of an existing .model file, as in "
            "4096=my.model or sp8192_caseops=my.model"
        )
    return f"sp{variant}" if variant.isdecimal() else variant, Path(path)


# ---------------------------------------------------------------- tokenizer training


def cut_text(text: str, limit_bytes: int) -> Iterator[str]:
    """Pieces of at most limit_bytes UTF-8 bytes that join to the text, cut after a newline or space where one is near.

    SentencePiece silently drops longer lines. The word after a cut loses its leading space: one word in about 700.
    """
    data, start = text.encode("utf-8"), 0
    while len(data) - start > limit_bytes:
        low, end = start + limit_bytes // 2, start + limit_bytes
        cut = max(data.rfind(b"\n", low, end), -1) + 1 or data.rfind(b" ", low, end) + 1
        if not cut:
            cut = end
            while data[cut] & 0xC0 == 0x80:  # inside a character
                cut -= 1
        yield data[start:cut].decode("utf-8")
        start = cut
    yield data[start:].decode("utf-8")


class TrainingLines:
    """Iterates over the lines for the tokenizer trainer and counts the bytes of text that came in and that went out."""

    def __init__(self, texts: Iterable[str], limit_bytes: int) -> None:
        self.texts, self.limit_bytes = texts, limit_bytes  # texts as the tokenizer will see them
        self.text_bytes = self.used_bytes = 0

    def __iter__(self) -> Iterator[str]:
        table = str.maketrans(RESERVED_CHARACTERS)
        for text in self.texts:
            stripped = text.strip()
            self.text_bytes += len(stripped.encode("utf-8"))
            for line in cut_text(stripped.translate(table), self.limit_bytes):
                if line.strip():
                    self.used_bytes += len(line.encode("utf-8"))
                    yield line

    def check_share(self, name: str) -> float:
        share = self.used_bytes / max(1, self.text_bytes)
        if share < MIN_TRAINED_SHARE:
            raise DataError(
                f"tokenizer {name}: only {share:.1%} of the text was usable for training, less than "
                f"{MIN_TRAINED_SHARE:.0%}; clean the documents"
            )
        return share


def available_memory_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None  # not Linux


def check_memory(spec: TokenizerSpec, text_bytes: int, force: bool) -> None:
    """Print what training will need, refuse when that is more than there is: the trainer holds all text in memory."""
    need, available = TRAINER_MEMORY_FACTOR * text_bytes + (100 << 20), available_memory_bytes()
    print(f"{spec.name}: training on {text_bytes / 1e6:,.1f} MB, about {need / 1e9:.1f} GB of memory", flush=True)
    if available is not None and need > available and not force:
        raise spec.error(
            f"training needs about {need / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are available; "
            "lower train_docs in the spec, or use --reuse-sp-model, or --force-memory to try anyway"
        )


class Preparation:
    """What a transform does to a text before the tokenizer: normalise it as the metric's text is, then CaseOps.

    The model itself then normalises nothing, else it could undo what makes the transform reversible.
    """

    def __init__(self, normalization: str) -> None:
        import sentencepiece as spm

        self._normalizer = spm.SentencePieceNormalizer(
            rule_name=normalization, add_dummy_prefix=False, remove_extra_whitespaces=True, escape_whitespaces=False
        )

    def normalize(self, text: str) -> str:
        """The text that the metric scores; U+2581 is a space to SentencePiece, so it is one here."""
        return self._normalizer.normalize(text).replace(shards.SPACE_MARKER, " ")

    def __call__(self, text: str) -> str:
        return caseops.encode(self.normalize(text))


def train_sentencepiece(spec: TokenizerSpec, texts: Iterable[str]) -> bytes:
    """A model trained on the texts, the same bytes on every run: nothing about paths or the machine goes into it."""
    import sentencepiece as spm

    settings = {**RECIPE_SETTINGS, **spec.trainer}
    if spec.transform:
        texts = map(Preparation(spec.normalization), texts)
        settings |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
        settings["user_defined_symbols"] = list(caseops.MARKERS)
    lines = TrainingLines(texts, settings["max_sentence_length"])
    model = io.BytesIO()
    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, vocab_size=spec.vocab_size, **settings
        )
    except (RuntimeError, OSError) as error:
        raise spec.error(f"SentencePiece could not train {spec.vocab_size} pieces: {error}") from None
    share = lines.check_share(spec.name)
    check_vocabulary_reached(spec, spm.SentencePieceProcessor(model_proto=model.getvalue()).get_piece_size())
    print(f"{spec.name}: trained on {share:.2%} of {lines.text_bytes:,} bytes", flush=True)
    return model.getvalue()


def check_vocabulary_reached(spec: TokenizerSpec, pieces: int) -> None:
    if pieces != spec.vocab_size:
        raise spec.error(
            f"vocab_size {spec.vocab_size} is more than these documents give; the largest possible is {pieces}. "
            "Ask for that or less, or give more documents"
        )


def build_tokenizer(spec: TokenizerSpec, documents: Documents, folder: Path, force_memory: bool) -> dict:
    """Write the tokenizer's files into folder; returns its manifest entry."""
    entry = {"name": spec.name, "kind": spec.kind, "vocab_size": spec.vocab_size}
    entry |= {"bos_id": shards.BOS_ID, "eos_id": shards.EOS_ID}
    if spec.kind == "byte":
        path = folder / Path(spec.path).name
        shards.write_json(path, {**entry, "pad_id": shards.PAD_ID, "unk_id": shards.UNK_ID, "byte_offset": 4})
        return {**entry, "path": spec.path, "sha256": shards.sha256_file(path)}
    if spec.reuse:
        model = spec.reuse.read_bytes()
    else:
        share = min(1.0, spec.train_docs / documents.num_docs)
        check_memory(spec, int(documents.lines_bytes * share), force_memory)
        model = train_sentencepiece(spec, itertools.islice(documents.source.texts(), spec.train_docs))
    return {**entry, **write_model(spec, model, folder)}


def write_model(spec: TokenizerSpec, model: bytes, folder: Path) -> dict:
    """Check the model, write it and its vocabulary; returns what the manifest says of them."""
    import sentencepiece as spm

    source = str(spec.reuse or spec.name)
    tokenizer = load_model(model, source)
    shards.check_tokenizer(tokenizer, spec.vocab_size, source, byte_files=bool(spec.transform))
    if spec.transform:
        check_caseops_model(tokenizer, source)
    model_path = folder / Path(spec.path).name
    vocab_path = model_path.with_suffix(".vocab")
    model_path.write_bytes(model)
    vocab = "".join(f"{tokenizer.id_to_piece(i)}\t{tokenizer.get_score(i):g}\n" for i in range(spec.vocab_size))
    vocab_path.write_text(vocab, encoding="utf-8", newline="\n")
    entry = {"model_path": spec.path, "vocab_path": f"tokenizers/{vocab_path.name}"}
    if spec.transform:
        entry["transform"] = {"name": spec.transform, "version": caseops.VERSION, "normalization": spec.normalization}
    sha256 = hashlib.sha256(model).hexdigest()
    return {**entry, "sha256": sha256, "reused": bool(spec.reuse), "sentencepiece_version": spm.__version__}


def check_caseops_model(tokenizer: spm.SentencePieceProcessor, source: str) -> None:
    """DataError unless every marker is a piece of its own and the model changes no character."""
    probe = "\ufb01 two  spaces \u00bd A \uff21 \u00c9"
    known = all(not tokenizer.is_unknown(tokenizer.piece_to_id(marker)) for marker in caseops.MARKERS)
    if not known or tokenizer.decode(tokenizer.encode(probe)) != probe:
        raise DataError(
            f"{source}: not a tokenizer for caseops: it needs the markers U+E001 to U+E003 as user-defined pieces and "
            "the identity normalisation; train one with this script"
        )


def load_model(model: bytes, source: str) -> spm.SentencePieceProcessor:
    import sentencepiece as spm

    try:
        return spm.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise DataError(f"{source}: not a SentencePiece model ({error})") from None


