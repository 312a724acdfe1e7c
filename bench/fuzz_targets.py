"""The damage of bench/fuzz.py: what each kind of case does to a good input, and what must hold for what comes out."""
from __future__ import annotations

import base64
import bz2
import contextlib
import copy
import io
import json
import lzma
import math
import pickle
import random
import re
import struct
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import brotli
import conftest
import golf_helpers
import numpy as np
import sentencepiece
import torch
from fuzz import Examination, Kind

import train_gpt as tg
from golf import check, logs, records, scripts
from golf.cli import print_json

GOLDEN = conftest.GOLDEN
HP = conftest.settings()

# -- damage to bytes, to JSON and to text ------------------------------------------------------------------------------

def damage(data: bytes, rng: random.Random, foreign: bytes = b"") -> bytes:
    """One to four changes: flipped bits, bytes set, cut, doubled, dropped, moved, or spliced in from elsewhere."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
        if rng.random() < 0.5:
            b = min(len(data), a + rng.choice((1, 2, 4, 8, 64)))
        part, donor = data[a:b], foreign or rng.randbytes(b - a)
        bits = bytearray(part[:1] or b"\0")
        bits[0] ^= 1 << rng.randrange(8)
        new = rng.choice((bytes(bits) + part[1:], bytes(bits) + part[1:], bytes(len(part)), b"\xff" * len(part), b"",
                          part * 2, part[::-1], donor[a:b], donor[:b - a], rng.randbytes(b - a)))
        data = rng.choice((data[:a] + new + data[b:], data[:a] + new + data[b:], data[:a] + new + data[b:], data[:a]))
    return data

ODD_VALUES = [None, True, -1, 0, 1, 2**31, -2**63, 2**64, 10**400, 0.5, -0.0, 1e308, math.inf, -math.inf, math.nan,
              "", "x", "\0", "\ud800", "\u0663", "\u00b2", "../../x", "/etc/passwd", "1e999", "x" * 100_000, [], {},
              [[]], [None], {"": None}, [1, "x", {}], {"seed": []}, {"name": {"a": 1}}]

def odd_value(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(ODD_VALUES))

def paths(value: Any, at: tuple = ()) -> Iterator[tuple]:
    """Where there is something in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield (*at, key)
        yield from paths(child, (*at, key))

def damage_json(value: Any, rng: random.Random) -> Any:
    """A copy with one to three values replaced, dropped, moved, renamed or wrapped."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 2, 3))):
        everywhere = list(paths(value))
        if not everywhere or rng.random() < 0.02:
            return odd_value(rng)
        *above, key = rng.choice(everywhere)
        parent = value
        for step in above:
            parent = parent[step]
        way = rng.randrange(5)
        if way == 0:
            del parent[key]
        elif way == 1 and isinstance(parent, dict):
            parent[rng.choice(("", "x", "seed", "name", f"{key} "))] = parent.pop(key)
        elif way == 2:
            old = parent[key]
            parent[key] = rng.choice(([old], {"x": old}, [old, 1, old], str(old)))
        else:
            parent[key] = odd_value(rng)
    return value

def damage_document(value: Any, rng: random.Random) -> bytes:
    """JSON text with damaged values or, now and then, damaged bytes, or nested without end."""
    way = rng.random()
    if way < 0.02:
        return rng.choice((b"[", b'{"a":', b'{"datasets":[')) * rng.choice((900, 5000, 100_000))
    text = json.dumps(damage_json(value, rng) if way < 0.8 else value, ensure_ascii=rng.random() < 0.9)
    data = text.encode("utf-8", "surrogatepass")
    return damage(data, rng) if way > 0.7 else data

ODD_NUMBERS = ["nan", "inf", "-inf", "-1", "0", "1e309", "1e308", "9" * 400, "9" * 5000, "1e-400", "0x10", "1_000", "",
               "1.2.3", "\u0663", "\u00b2", "0.", ".5", "1e5", "-0", "16000001"]
ODD_ENDS = [" ", "\t", "=" * 100, "\r", "\0", "\u2028", "x" * 100_000, "(" * 5000, "a " * 20_000]

def damage_text(text: str, rng: random.Random) -> str:
    """Lines dropped, doubled, swapped, cut, joined or repeated, or numbers replaced."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        lines = text.split("\n")
        a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
        way = rng.randrange(8)
        if way == 0:
            del lines[min(a, b):max(a, b)]
        elif way == 1:
            lines[a], lines[b] = lines[b], lines[a]
        elif way == 2:
            lines.insert(a, lines[b])
        elif way == 3:
            lines[a] = lines[a][:rng.randrange(len(lines[a]) + 1)]
        elif way == 4:
            lines[a] += rng.choice(ODD_ENDS)
        else:
            numbers = list(re.finditer(r"\d+(\.\d+)?", text)) or [re.match("", text)]
            match = rng.choice(numbers)
            lines = [text[:match.start()] + rng.choice(ODD_NUMBERS) + text[match.end():]]
        text = "\n".join(lines)
    return text

def varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + varint(value >> 7) if value > 127 else bytes([value])

def read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at

def is_one_line(error: Exception) -> bool:
    return bool(str(error)) and "\n" not in str(error)

# -- artifacts ---------------------------------------------------------------------------------------------------------

def small_model() -> tg.GPT:
    """A model as the evaluation of the recipe holds it: tables in bf16."""
    hp = conftest.settings(num_layers=1, xsa_last_n=0, ve_layers=0)
    return tg.build_model(hp, tg.Operations(tg.sdpa_attention), torch.device("cpu"), torch.bfloat16)

def quantize(state: dict[str, torch.Tensor]) -> tg.Quantized:
    """In every storage class, which else only large tensors have."""
    before, tg.PASSTHROUGH_MAX_ELEMENTS = tg.PASSTHROUGH_MAX_ELEMENTS, 300
    try:
        return tg.quantize_state(state, {}, HP)
    finally:
        tg.PASSTHROUGH_MAX_ELEMENTS = before

def saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()

def compress(raw: bytes, rng: random.Random) -> bytes:
    """As `pack_artifact`, but quickly."""
    raw = tg.byte_shuffle(raw)
    return lzma.compress(raw, preset=0) if rng.random() < 0.3 else brotli.compress(raw, quality=1)

MODEL = small_model()
STATE = {name: t.clone() for name, t in MODEL.state_dict().items()}
QUANTIZED = quantize(STATE)
CONTENT = {"w": QUANTIZED.tensors, "m": QUANTIZED.meta}
assert {"int6", "int8"} <= {m["type"] for m in QUANTIZED.meta.values() if isinstance(m, dict)}
SETTINGS = tg.forward_settings(MODEL.hp)
PACKED = [tg.pack_artifact(QUANTIZED, compressor, SETTINGS) for compressor in ("brotli", "lzma")]
RAW = tg.byte_unshuffle(tg.decompress(PACKED[0]))
GOOD = tg.dequantize(*tg.unpack_artifact(PACKED[0]), STATE)

def write_artifact(folder: Path, data: bytes, same: bool = False) -> Examination:
    (folder / "given.ptz").write_bytes(data)
    return partial(load_artifact, folder / "given.ptz", same)

def load_artifact(path: Path, same: bool) -> str:
    """As EVAL_ONLY loads it. Accepted weights are finite; `same`: checksums leave no others than the good ones."""
    run = SimpleNamespace(world=tg.World(), model=MODEL, hp=MODEL.hp, source=b"", results={}, failure=None)
    try:
        tg.Run.load_artifact(run, path)
    except tg.ArtifactError as error:
        assert is_one_line(error), "an error must be one line"
        return "refused"
    for name, tensor in MODEL.state_dict().items():
        assert bool(tensor.isfinite().all()), f"{name} is not finite"
        assert not same or torch.equal(tensor, GOOD[name]), f"{name} changed silently"
    return "correct"

def compressed_bytes(rng: random.Random, folder: Path) -> Examination:
    data, other = rng.sample(PACKED, 2)
    return write_artifact(folder, damage(data, rng, other), same=True)

def raw_bytes(rng: random.Random, folder: Path) -> Examination:
    return write_artifact(folder, compress(damage(RAW, rng), rng), same=True)

def shuffled_bytes(rng: random.Random, folder: Path) -> Examination:
    data = damage(tg.byte_shuffle(RAW)[:rng.choice((20, 10**6))], rng)
    return write_artifact(folder, brotli.compress(data, quality=1), same=True)

def members(raw: bytes) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        return [(info.filename, archive.read(info)) for info in archive.infolist()]

def zipped(files: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that come twice
        for name, data in files:
            archive.writestr(name, data)
    return buffer.getvalue()

def pickle_bytes(rng: random.Random, folder: Path) -> Examination:
    """A damaged pickle whose checksum is right."""
    files = [(name, damage(data, rng) if name.endswith("data.pkl") else data) for name, data in members(RAW)]
    return write_artifact(folder, compress(zipped(files), rng))

ODD_NAMES = ["../escaped", "/tmp/fuzz_escaped", "archive/../../escaped", "archive/data/..", "archive/", "/",
             "x" * 60_000, "\n", "archive/data.pkl", "archive/data/0", "archive/.data/serialization_id",
             "archive/byteorder", "c:\\escaped"]

def zip_members(rng: random.Random, folder: Path) -> Examination:
    """Members renamed (out of the folder, too), doubled, dropped, damaged, added or compressed; checksums are right."""
    files = members(RAW)
    for _ in range(rng.choice((1, 1, 2))):
        at, way = rng.randrange(len(files)), rng.randrange(6)
        name, data = files[at]
        if way == 0:
            moved = name.replace("archive/", rng.choice(("../", "/", "x"))) or "x"
            files[at] = rng.choice((moved, rng.choice(ODD_NAMES))), data
        elif way == 1:
            files.append((name, damage(data, rng)))
        elif way == 2:
            files.pop(at)
        elif way == 3:
            files[at] = name, damage(data, rng)
        elif way == 4:
            files.insert(rng.choice((0, at)), (rng.choice(ODD_NAMES), rng.randbytes(50)))
        else:
            files = [(name.replace("archive/", "../"), data) for name, data in files]
        if not files:
            break
    method = zipfile.ZIP_DEFLATED if rng.random() < 0.2 else zipfile.ZIP_STORED
    return write_artifact(folder, compress(zipped(files, method), rng))

def zip_sizes(rng: random.Random, folder: Path) -> Examination:
    """Central directory and local headers that declare other sizes and places than the members have."""
    raw = bytearray(RAW)
    spots = [m.start() + offset for m in re.finditer(rb"PK\x01\x02", RAW) for offset in (20, 24, 42)]
    spots += [m.start() + offset for m in re.finditer(rb"PK\x03\x04", RAW) for offset in (18, 22)]
    spots += [m.start() + offset for m in re.finditer(rb"PK\x05\x06", RAW) for offset in (8, 12, 16)]
    for spot in rng.sample(spots, rng.choice((1, 1, 2, 5))):
        size = rng.choice((0, 1, 2**20, 2**31 - 1, 2**31, 2**32 - 1, rng.randrange(2**32)))
        raw[spot:spot + 4] = struct.pack("<I", size)
    return write_artifact(folder, compress(bytes(raw), rng))

def odd_tensor(like: torch.Tensor, rng: random.Random) -> Any:
    """A tensor that a pickle may hold but an artifact must not, or must be judged by its values."""
    shape = like.shape
    return rng.choice((
        lambda: torch.full(shape, math.nan, dtype=torch.float16), lambda: torch.full(shape, math.inf),
        lambda: torch.full(shape, 3.4e38), lambda: torch.full(shape, 3.4e38 / 3),
        lambda: torch.full(shape, -1e308, dtype=torch.float64),
        lambda: torch.zeros(shape, device="meta"), lambda: torch.zeros(shape).to_sparse(),
        lambda: torch.zeros(shape, dtype=torch.complex64), lambda: torch.zeros(shape, dtype=torch.bool),
        lambda: torch.zeros(shape, dtype=torch.uint8).view(torch.bits8), lambda: torch.zeros(shape, dtype=torch.uint16),
        lambda: torch.zeros(shape, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        lambda: torch.zeros(shape).to(torch.float8_e5m2), lambda: torch.zeros([1] * len(shape)).expand(shape),
        lambda: torch.zeros(1).expand(100_000, 100_000), lambda: torch.zeros(()), lambda: torch.zeros(0),
        lambda: torch.zeros((*shape, 1)), lambda: torch.zeros(shape[:-1]), lambda: torch.zeros(shape[::-1]),
        lambda: torch.nn.Parameter(torch.ones(shape)), lambda: torch.ones(shape).as_strided(shape, [0] * len(shape)),
        lambda: torch.full(shape, 127, dtype=torch.int8), lambda: torch.full(shape, 2**62),
        lambda: odd_value(rng)))()

def contents(rng: random.Random, folder: Path) -> Examination:
    """Another content under right checksums: wrong dtypes, shapes and values, NaN scales, names of other types."""
    content = {"w": dict(CONTENT["w"]), "m": dict(CONTENT["m"])}
    for _ in range(rng.choice((1, 1, 2))):
        part = rng.choice(("w", "w", "w", "m"))
        name = rng.choice(list(content[part]) or ["x"])
        way = rng.randrange(12)
        if way == 0:
            content[part].pop(name, None)
        elif way == 1:
            new = rng.choice((0, None, "", "x", ("a", 1), f"{name}.q", "x" * 10_000))
            content[part][new] = content[part].pop(name, 0)
        elif way == 2:
            content[rng.choice(("w", "m", "x"))] = rng.choice((odd_value(rng), [], {}, CONTENT))
            break
        elif part == "m":
            content["m"][name] = rng.choice((odd_value(rng), "int6", "passthrough", {"type": "int8"}))
        else:
            content["w"][name] = odd_tensor(CONTENT["w"].get(name, torch.zeros(3)), rng)
    return write_artifact(folder, compress(saved(content), rng))

class Calls:
    """Pickles as a call of `function`; arguments may be calls."""

    def __init__(self, function: str, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def code(self) -> bytes:
        module, _, name = self.function.rpartition(".")
        bare = slice(2, -1)  # without the head and the stop
        codes = [a.code() if isinstance(a, Calls) else pickle.dumps(a, 2)[bare] for a in self.arguments]
        return b"c" + module.encode() + b"\n" + name.encode() + b"\n(" + b"".join(codes) + b"tR"

    def pickled(self) -> bytes:
        return b"\x80\x02}(X\x01\0\0\0w" + self.code() + b"X\x01\0\0\0m}u."

CALLS = [Calls("os.system", "touch escaped"), Calls("posix.system", "touch escaped"), Calls("builtins.eval", "1/0"),
         Calls("builtins.exec", "open('escaped', 'w')"), Calls("builtins.open", "escaped", "w"),
         Calls("subprocess.Popen", ["touch", "escaped"]), Calls("socket.create_connection", ("127.0.0.1", 9)),
         Calls("builtins.__import__", "os"), Calls("torch.load", "escaped"), Calls("torch.hub.load", "a/b", "c"),
         Calls("torch.utils.cpp_extension.load", "x", ["x.cpp"]), Calls("numpy.load", "escaped"),
         Calls("os.mkdir", "escaped"), Calls("shutil.rmtree", "."), Calls("builtins.getattr", "x", "upper"),
         Calls("os.kill", 1, 0),
         Calls("importlib.import_module", "this"), Calls("train_gpt.write_file", "escaped", b""),
         Calls("golf.cli.write_file", "escaped", b""), Calls("torch.serialization.add_safe_globals", [])]

def forbidden_globals(rng: random.Random, folder: Path) -> Examination:
    """Pickles that call what they must not, alone or damaged, in a zip or in the old format."""
    data = rng.choice(CALLS).pickled()
    if rng.random() < 0.3:
        data = damage(data, rng)
    files = [(name, data if name.endswith("data.pkl") else content) for name, content in members(RAW)]
    old = pickle.dumps(0x1950a86a20f9469cfc6c, 2) + data  # torch's mark of the format before zip
    return write_artifact(folder, compress(rng.choice((zipped(files), data, old)), rng))

# Each stream repeats one compressed part of zeros, so that terabytes would take no longer to make.

@cache
def zeros_brotli(megabytes: int) -> bytes:
    coder = brotli.Compressor(quality=5, lgwin=24)
    head, part = (coder.process(bytes(64 << 20)) + coder.flush() for _ in range(2))
    return head + part * (megabytes // 64 - 1) + coder.finish()

@cache
def zeros_xz(megabytes: int) -> bytes:
    """One stream of many blocks: header, blocks, index of (size, size of content) records, footer."""
    one = lzma.compress(bytes(16 << 20), check=lzma.CHECK_CRC32, preset=0)
    index_bytes, count = 4 * (struct.unpack("<I", one[-8:-4])[0] + 1), megabytes // 16
    begin = len(one) - 12 - index_bytes
    end = begin + 2
    for _ in range(2):
        end = read_varint(one, end)[1]
    index = b"\0" + varint(count) + one[begin + 2:end] * count
    index += bytes(-len(index) % 4)
    index += struct.pack("<I", zlib.crc32(index))
    tail = struct.pack("<I", len(index) // 4 - 1) + one[-4:-2]
    return one[:12] + one[12:begin] * count + index + struct.pack("<I", zlib.crc32(tail)) + tail + b"YZ"

@cache
def zeros_zlib(megabytes: int) -> bytes:
    coder = zlib.compressobj(1)
    head, part = (coder.compress(bytes(16 << 20)) + coder.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    return head + part * (megabytes // 16 - 1)  # its checksum is missing, which is seen at the end only

@cache
def zeros_zip(megabytes: int) -> bytes:
    """A good artifact's zip in which one tensor's storage is deflated zeros."""
    with zipfile.ZipFile(buffer := io.BytesIO(), "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, data in members(RAW):
            archive.writestr(name, bytes(megabytes << 20) if name.endswith("data/0") else data)
    return buffer.getvalue()

def huge_storage() -> bytes:
    """A pickle that declares 2**31 - 1 elements for a storage and its tensor of 2,748."""
    declared = struct.pack("<i", 2**31 - 1)
    files = members(saved({"w": {**CONTENT["w"], "x": torch.zeros(2748)}, "m": CONTENT["m"]}))
    return zipped([(name, data.replace(b"M\xbc\x0a", b"J" + declared) if name.endswith("data.pkl") else data)
                   for name, data in files])

def called(function: str, *arguments: Any) -> bytes:
    code = Calls(function, *arguments).pickled()
    files = [(name, code if name.endswith("data.pkl") else data) for name, data in members(RAW)]
    return brotli.compress(zipped(files), quality=1)

def expanded(**more: Any) -> bytes:
    """One stored number that stands for 40 GB of equal ones; `more` goes into meta."""
    content = {"w": {**CONTENT["w"], "x": torch.zeros(1).expand(100_000, 100_000)}, "m": CONTENT["m"] | more}
    return brotli.compress(saved(content), quality=1)

@cache
def bomb_files() -> list[bytes]:
    deflated = tg.byte_shuffle(zeros_zip(288))
    return [zeros_brotli(4096), zeros_brotli(102_400), zeros_xz(4096),
            brotli.compress(zeros_brotli(102_400), quality=5),
            lzma.compress(zeros_xz(4096), preset=0), brotli.compress(zeros_xz(4096), quality=1),
            brotli.compress(deflated, quality=5), lzma.compress(deflated, preset=0),
            called("builtins.bytearray", 10**12), called("builtins.bytearray", 300 << 20),
            called("builtins.bytearray", Calls("builtins.bytearray", 300 << 20)),  # a copy uses its memory
            called("torch.FloatStorage", 2**29), called("torch.Size", [2**62] * 4),
            brotli.compress(huge_storage(), quality=1), expanded(), expanded(__artifact__={"format": 1, "sha256": ""})]

def bombs(rng: random.Random, folder: Path) -> Examination:
    """Small files that expand to gigabytes, whole or damaged."""
    data = rng.choice(bomb_files())
    return write_artifact(folder, damage(data, rng) if rng.random() < 0.2 else data)

@cache
def foreign_files() -> list[bytes]:
    """Other formats, other contents, and the beginnings of both."""
    old, arrays = io.BytesIO(), io.BytesIO()
    torch.save(CONTENT, old, _use_new_zipfile_serialization=False)
    np.savez(arrays, w=np.zeros(3), m=np.array([{"a": 1}], dtype=object))
    heads = [b"", b"BSHF", b"BSHF\0", b"BSHF\xff", b"\x28\xb5\x2f\xfd", b"\x1f\x8b\x08", b"PK\x05\x06" + bytes(18)]
    others = [saved(content) for content in ([], None, 3, {"w": {}, "m": {}}, {"w": {}, "m": {}, "x": {}})]
    files = [path.read_bytes() for path in (GOLDEN / "tokenizer_512.model", GOLDEN / "shards/fineweb_val_000000.bin")]
    return [*heads, *others, *files, old.getvalue(), arrays.getvalue(), RAW, pickle.dumps(CONTENT["m"])]

def foreign(rng: random.Random, folder: Path) -> Examination:
    """Other files and streams, bare or compressed, joined or damaged."""
    plain = rng.choice(foreign_files())
    pack = rng.choice((bytes, partial(brotli.compress, quality=1), partial(lzma.compress, preset=0),
                       partial(lzma.compress, format=lzma.FORMAT_ALONE)))
    data = pack(plain)
    data = rng.choice((data, data, data + rng.choice(PACKED), rng.choice(PACKED) + data))
    return write_artifact(folder, damage(data, rng) if rng.random() < 0.3 else data)

# -- data: shards, manifests -----------------------------------------------------------------------------------------

SHARDS = {path.name: path.read_bytes() for path in sorted((GOLDEN / "shards").glob("*.bin"))}
TOKENIZER = (GOLDEN / "tokenizer_512.model").read_bytes()
TABLES = tg.byte_tables(sentencepiece.SentencePieceProcessor(model_proto=TOKENIZER))
VAL = np.frombuffer(SHARDS["fineweb_val_000000.bin"][1024:], "<u2")

def write_data(folder: Path, changed: dict[str, bytes], transform: str = "") -> tg.Hyperparameters:
    """The golden shards with changed files, by their names in the dataset, and settings for them."""
    hp = conftest.settings(data_dir=str(folder), transform=transform)
    hp.dataset_dir.mkdir(parents=True)
    for name, data in {**SHARDS, **changed}.items():
        (hp.dataset_dir / name).write_bytes(data)
    return hp

def read_data(hp: tg.Hyperparameters) -> str:
    """What a run does with its data before the first step, and three batches."""
    try:
        val = tg.load_validation(hp, TABLES)
        loader = tg.CoprimeLoader(tg.check_train_shards(hp), hp.train_seq_len, 16, vocab_size=hp.vocab_size)
        batches = [loader.next_batch() for _ in range(3)]
    except (tg.RunError, OSError) as error:  # main() prints one message for both
        assert str(error), "an error without a message"
        return "refused"
    paths = sorted(hp.dataset_dir.glob("fineweb_val_*.bin"))
    stored = np.concatenate([np.frombuffer(path.read_bytes()[1024:], "<u2") for path in paths])
    assert np.array_equal(val.tokens, stored[:len(val.tokens)]), "other validation tokens than stored"
    assert val.targets % hp.eval_seq_len == 0 and val.tokens.max() < hp.vocab_size, "validation set"
    assert val.target_bytes > 0 and math.isfinite(val.bits_per_byte(1.0)), "targets must stand for some bytes"
    assert all(part.min() >= 0 and part.max() < hp.vocab_size for batch in batches for part in batch), "ids of a batch"
    return "correct"

def shard_bytes(rng: random.Random, folder: Path) -> Examination:
    names = rng.sample(list(SHARDS), rng.choice((1, 1, 2)))
    return partial(read_data, write_data(folder, {name: damage(SHARDS[name], rng) for name in names}))

def shard_headers(rng: random.Random, folder: Path) -> Examination:
    """Odd fields; token counts that do and do not fit the file; ids over the vocabulary."""
    changed = {}
    for name in rng.sample(list(SHARDS), rng.choice((1, 2, 5))):
        count = rng.choice((0, 1, 2, 63, 64, 65, 66, 129, 2000))
        tokens = np.array([rng.choice((0, 1, 2, 400, 511)) for _ in range(count)], "<u2")
        if rng.random() < 0.2 and count:
            tokens[rng.randrange(count)] = rng.choice((512, 65_535))
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, count
        if rng.random() < 0.5:
            header[rng.randrange(5)] = rng.choice((0, -1, 1, count + 1, -512, 2**31 - 1, -2**31, 20240520))
        changed[name] = header.tobytes() + tokens.tobytes()
    return partial(read_data, write_data(folder, changed))

LINKS = ("nowhere", ".", "/dev/zero", "/dev/null", "/proc/self/mem", "loop")

def odd_file(path: Path, rng: random.Random) -> None:
    """Something else in a file's place: nothing, a folder, a link, an empty or a foreign file."""
    path.unlink(missing_ok=True)
    way = rng.randrange(5)
    if way == 0:
        path.mkdir()
    elif way == 1:
        target = rng.choice(LINKS)
        path.symlink_to(path.name if target == "loop" else target)
    elif way == 2:
        path.write_bytes(rng.choice((b"", b"\0", RAW, b"\xff\xfe" * 50)))

def shard_files(rng: random.Random, folder: Path) -> Examination:
    hp = write_data(folder, {})
    for name in rng.sample([*SHARDS, "fineweb_val_x.bin", "fineweb_train_.bin", "fineweb_train_000009.bin"], 2):
        odd_file(hp.dataset_dir / name, rng)
    return partial(read_data, hp)

def manifest(transform: str) -> dict[str, Any]:
    """A manifest of the golden shards, with a sidecar of two bytes a token for the transform."""
    stats = {"docs_val": int((VAL == 1).sum()), "tokens_val": len(VAL), "files_val": 1, "bytes_val_source": 5000,
             "bytes_val_normalised": 2 * (len(VAL) - 1) if transform else TABLES.count(VAL)}
    splits = {"val": {"first_doc": 0, "last_doc": 9}, "train": {"first_doc": 10, "last_doc": 99}}
    entry = {"name": f"fineweb10B_sp512{transform and '_' + transform}", "stats": stats, "splits": splits}
    sidecar = {"bytes_sidecar": {"suffix": ".bytes", "dtype": "uint16"}} if transform else {}
    return {"version": 1, "datasets": [{"name": "fineweb10B_sp1024", "stats": {}}, {**entry, **sidecar}]}

def manifests(transform: str, rng: random.Random, folder: Path) -> Examination:
    sizes = np.full(len(VAL), 2, "<u2").tobytes()
    changed = {"fineweb_val_000000.bytes": sizes} if transform else {}
    if transform and rng.random() < 0.3:
        changed["fineweb_val_000000.bytes"] = rng.choice((damage(sizes, rng), bytes(len(sizes)), b"", sizes[:-1]))
    hp = write_data(folder, changed, transform)
    (folder / "manifest.json").write_bytes(damage_document(manifest(transform), rng))
    if rng.random() < 0.03:
        odd_file(folder / "manifest.json", rng)
    return partial(read_data, hp)

# -- tokenizers --------------------------------------------------------------------------------------------------------

def protobuf_fields(data: bytes) -> list[bytes]:
    """The top-level fields of a message, each with its key."""
    fields, at = [], 0
    while at < len(data):
        key, value = read_varint(data, at)
        size, begin = read_varint(data, value) if key & 7 in (0, 2) else ({1: 8, 5: 4}[key & 7], value)
        end = begin + size * (key & 7 != 0)
        fields.append(data[at:end])
        at = end
    return fields

def piece(text: bytes, score: float, kind: int) -> bytes:
    body = b"\x0a" + varint(len(text)) + text + b"\x15" + struct.pack("<f", score) + b"\x18" + varint(kind)
    return b"\x0a" + varint(len(body)) + body

def tokenizer_pieces(rng: random.Random, folder: Path) -> Examination:
    """Pieces and trainer settings dropped, doubled, moved, damaged or replaced in a well-formed model."""
    fields = protobuf_fields(TOKENIZER)
    for _ in range(rng.choice((1, 1, 2, 10))):
        at, way = rng.randrange(len(fields)), rng.randrange(6)
        if way == 0:
            fields.pop(at)
        elif way == 1:
            fields.insert(at, rng.choice(fields))
        elif way == 2:
            other = rng.randrange(len(fields))
            fields[at], fields[other] = fields[other], fields[at]
        elif way == 3:
            fields[at] = fields[at][:2] + damage(fields[at][2:], rng)
        else:
            text = rng.choice((b"", b"a", b"\xe2\x96\x81", b"\xff", b"<0x41>", b"<0xZZ>", b"x" * 40_000, b"\0", b"\n"))
            fields[at] = piece(text, rng.choice((0.0, -1e38, math.nan)), rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 99)))
        if not fields:
            break
    return partial(read_tokenizer, write_tokenizer(folder, b"".join(fields)))

def write_tokenizer(folder: Path, data: bytes) -> tg.Hyperparameters:
    hp = conftest.settings(data_dir=str(folder))
    hp.tokenizer_path.parent.mkdir(parents=True)
    hp.tokenizer_path.write_bytes(data)
    return hp

def read_tokenizer(hp: tg.Hyperparameters) -> str:
    try:
        tables = tg.byte_tables(tg.load_tokenizer(hp))
    except (tg.RunError, OSError):
        return "refused"
    assert all(len(part) == hp.vocab_size for part in (tables.base_bytes, tables.has_leading_space, tables.is_boundary))
    assert tables.base_bytes.min() >= 0 and tables.count(VAL) >= 0, "negative bytes"
    return "correct"

def tokenizer_bytes(rng: random.Random, folder: Path) -> Examination:
    data = damage(TOKENIZER, rng) if rng.random() < 0.95 else rng.choice(foreign_files())
    return partial(read_tokenizer, write_tokenizer(folder, data))

# -- logs and record folders -------------------------------------------------------------------------------------------

def good_record() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as base:
        folder = golf_helpers.build(Path(base))
        return {path.name: path.read_bytes() for path in folder.iterdir()}

RECORD = good_record()
for version in scripts.PYTHONS:
    scripts.find_python(version)  # now, since looking for them starts processes
LOG = RECORD["train_seed42.log"].decode("utf-8")
RECORDS = [{"type": "settings", "run_id": "run42", "seed": "42"},
           {"type": "step", "step": 1, "train_loss": 8.3, "train_seconds": 0.1, "tokens_per_second": 8e6,
            "lr_factor": 1.0},
           {"type": "validation", "step": 0, "val_loss": 8.3, "val_bpb": 3.6},
           {"type": "evaluation", "name": "sliding", "val_loss": 2.5, "val_bpb": 1.1, "eval_seconds": 64.0},
           {"type": "summary", "train_seconds": 590.0, "total_bytes": 15_900_000, "valid": True}]

def read_log(path: Path) -> str:
    """A log is read, or refused as ValueError or OSError, which the command line prints as one line."""
    try:
        log = logs.read_log(path)
        numbers = records.facts(log)
    except (ValueError, OSError) as error:
        assert is_one_line(error), "an error must be one line"
        return "refused"
    assert all(value is None or isinstance(value, (int, float)) for value in numbers.values()), numbers
    assert all(isinstance(text, str) for text in (*log.settings.values(), *log.summary.values(), *log.warnings))
    return "correct"

def log_bytes(rng: random.Random, folder: Path) -> Examination:
    path = folder / "run.txt"
    path.write_bytes(damage(LOG.encode("utf-8"), rng, b"\xff\n=\0" * 100))
    return partial(read_log, path)

def log_lines(rng: random.Random, folder: Path) -> Examination:
    path = folder / "run.txt"
    path.write_text(damage_text(LOG, rng), encoding="utf-8", newline="")
    return partial(read_log, path)

def log_records(rng: random.Random, folder: Path) -> Examination:
    """A damaged .jsonl beside a good log."""
    path = folder / "run.txt"
    path.write_text(LOG, encoding="utf-8")
    lines = [json.dumps(record).encode() for record in RECORDS]
    for at in rng.sample(range(len(lines)), rng.choice((1, 1, 2))):
        lines[at] = damage_document(RECORDS[at], rng).replace(b"\n", b" ")
    path.with_suffix(".jsonl").write_bytes(b"\n".join(lines) + rng.choice((b"", b"\n")))
    if rng.random() < 0.03:
        odd_file(path.with_suffix(".jsonl"), rng)
    return partial(read_log, path)

def write_record(folder: Path, changed: dict[str, bytes]) -> Path:
    place = folder / "track_10min_16mb/2026-04-01_Good"
    place.mkdir(parents=True)
    for name, data in {**RECORD, **changed}.items():
        (place / name).write_bytes(data)
    return place

def check_record(folder: Path) -> str:
    """`golf check` ends with findings that can be printed, whatever the folder holds that can be read."""
    try:
        findings = check.check_folder(folder, may_import=False)
    except OSError as error:  # the command line prints it as one line
        assert is_one_line(error), "an error must be one line"
        return "refused"
    for text in (finding.value for finding in findings):
        assert isinstance(text, str)
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")):
        check.show("record", findings)
        print_json([asdict(finding) for finding in findings])
    return "refused" if any(finding.severity == "error" for finding in findings) else "correct"

def record_submission(rng: random.Random, folder: Path) -> Examination:
    data = damage_document(json.loads(RECORD["submission.json"]), rng)
    return partial(check_record, write_record(folder, {"submission.json": data}))

def record_logs(rng: random.Random, folder: Path) -> Examination:
    names = rng.sample([name for name in RECORD if name.endswith(".log")], rng.choice((1, 2)))
    changed = {name: damage_text(RECORD[name].decode("utf-8"), rng).encode("utf-8") for name in names}
    return partial(check_record, write_record(folder, changed))

def record_readme(rng: random.Random, folder: Path) -> Examination:
    text = damage_text(RECORD["README.md"].decode("utf-8"), rng).encode("utf-8")
    return partial(check_record, write_record(folder, {"README.md": damage(text, rng) if rng.random() < 0.3 else text}))

MORE_FILES = ["train_seed9.log", "notes.txt", "model.ptz", "logs", "helper.py", "\u00e9.log", "a\nb.log",
              "x" * 200 + ".txt"]

def record_files(rng: random.Random, folder: Path) -> Examination:
    """Folders, links and foreign files in the place of a record's files, and files more."""
    place = write_record(folder, {})
    for name in rng.sample([*RECORD, *MORE_FILES], rng.choice((1, 2, 3))):
        odd_file(place / name, rng)
    return partial(check_record, place)

@cache
def script_constants() -> list[str]:
    """Python expressions of constants, as packed scripts hold them, that expand to gigabytes or are nothing."""
    blobs = [zeros_xz(4096), zeros_brotli(4096), zeros_zlib(320), bz2.compress(bytes(16 << 20)) * 64,
             lzma.compress(b"x = 1\n" * 3_000_000, preset=0), b"a" * 600]
    return [repr(encode(blob)) for blob in blobs for encode in (bytes, base64.b85encode, base64.b64encode)]

NESTED = ["(", "[", "-", "not ", "a.", "a+", "f(", "lambda:", "{1:", "'\\N{", "1" * 6000, "x = 1\n"]

def record_script(rng: random.Random, folder: Path) -> Examination:
    """Damaged source, source nested without end, and constants that expand to gigabytes."""
    source = RECORD["train_gpt.py"].decode("utf-8")
    way = rng.randrange(4)
    if way == 0:
        source = damage_text(source, rng)
    elif way == 1:
        source += "x = " + (rng.choice(NESTED) * rng.choice((90, 5000)))[:200_000]
    elif way == 2:
        source += f"import zlib\nexec(zlib.decompress({rng.choice(script_constants())}))\n"
    else:
        name = rng.choice(("../../x", "/etc/passwd", "/dev/zero", "train_gpt.py", ".", "logs", "x" * 200, "a b"))
        source += f"open({name!r})\nimport {rng.choice(('a.b', 'train_gpt', 'os.path', 'x' * 200))}\n"
    return partial(check_record, write_record(folder, {"train_gpt.py": source.encode("utf-8", "surrogatepass")}))

KINDS = [Kind(*row) for row in (
    ("artifact: compressed bytes", 30, compressed_bytes), ("artifact: raw bytes", 14, raw_bytes),
    ("artifact: shuffled bytes", 6, shuffled_bytes), ("artifact: pickle", 16, pickle_bytes),
    ("artifact: zip members", 12, zip_members), ("artifact: zip sizes", 8, zip_sizes),
    ("artifact: contents", 16, contents), ("artifact: forbidden globals", 8, forbidden_globals),
    ("artifact: bombs", 2, bombs, bomb_files), ("artifact: foreign", 6, foreign),
    ("shards: bytes", 8, shard_bytes), ("shards: headers", 10, shard_headers), ("shards: files", 4, shard_files),
    ("manifest: plain", 8, partial(manifests, "")), ("manifest: byte sidecar", 8, partial(manifests, "caseops")),
    ("tokenizer: bytes", 8, tokenizer_bytes), ("tokenizer: pieces", 8, tokenizer_pieces),
    ("log: bytes", 4, log_bytes), ("log: lines", 8, log_lines), ("log: records", 6, log_records),
    ("record: submission.json", 4, record_submission), ("record: logs", 2, record_logs),
    ("record: README.md", 2, record_readme), ("record: files", 2, record_files),
    ("record: script", 1, record_script, script_constants))]
