"""The inert reader gives what ``pickle.load`` gives, without running anything: real streams and all of Python's plain
types, compared value by value."""

import argparse
import collections
import copyreg
import datetime
import enum
import io
import math
import pathlib
import pickle
import pickletools
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero1ckpt.core.errors import CorruptError
from zero1ckpt.encodings.inert_pickle import (
    Dtype,
    EnumValue,
    GlobalRef,
    NumpyArray,
    NumpyDtype,
    Opaque,
    Record,
    StorageRef,
    TensorRef,
    load,
    load_first,
)
from zero1ckpt.encodings.inert_pickle.opcodes import OPCODES, _unknown

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = sorted((ROOT / "tests/data/pickles").iterdir())
CORPUS = ROOT.parent / "shared/corpus/megatron"

torch = pytest.importorskip("torch")


# --------------------------------------------------------------------------------------- the reference: pickle, stubbed


class Stub:
    """Stands for a class of megatron, which need not be installed."""

    def __init__(self, *args):
        self.args = args


class StubUnpickler(pickle.Unpickler):
    def __init__(self, file):
        super().__init__(file, encoding="utf-8")

    def find_class(self, module, name):
        if module.startswith("megatron"):
            return type(name, (Stub,), {"__module__": module})
        return super().find_class(module, name)

    def persistent_load(self, pid):
        return _Storage(pid)


class _Storage:
    def __init__(self, pid):
        self.pid = pid
        self.dtype = getattr(pid[1], "dtype", torch.uint8)
        self.device = torch.device("cpu")
        self._untyped_storage = torch.UntypedStorage(pid[4] * self.dtype.itemsize)


def reference(data):
    return StubUnpickler(io.BytesIO(data)).load()


def assert_same(ours, theirs, seen=None):
    """Every value that pickle made stands in what we made, with the same type where it is a plain one."""
    seen = set() if seen is None else seen
    if id(ours) in seen and isinstance(ours, (Record, list, dict, tuple)):
        return
    seen.add(id(ours))
    if isinstance(theirs, torch.dtype):
        assert ours == Dtype(str(theirs).removeprefix("torch."))
    elif isinstance(theirs, torch.layout):
        assert ours == GlobalRef("torch", str(theirs).removeprefix("torch."))
    elif isinstance(theirs, torch.Tensor):
        assert isinstance(ours, TensorRef)
        assert ours.shape == tuple(theirs.shape) and ours.stride == theirs.stride()
        assert ours.offset == theirs.storage_offset() and ours.dtype == str(theirs.dtype).removeprefix("torch.")
        assert ours.contiguous == theirs.is_contiguous()
    elif isinstance(theirs, np.ndarray):
        assert isinstance(ours, NumpyArray)
        array = ours.array()
        assert array.dtype == theirs.dtype and np.array_equal(array, theirs) and not array.flags.writeable
    elif isinstance(theirs, pathlib.PurePath):
        assert isinstance(ours, pathlib.PurePath) and str(ours) == str(theirs)
    elif isinstance(theirs, Stub):
        assert type(ours) is Opaque and ours.type == GlobalRef(type(theirs).__module__, type(theirs).__qualname__)
        assert_same(ours.args, theirs.__dict__.get("args", ()), seen)
        assert_same(ours.fields, {k: v for k, v in vars(theirs).items() if k != "args"}, seen)
    elif isinstance(theirs, enum.Enum):
        assert ours == EnumValue(GlobalRef(type(theirs).__module__, type(theirs).__qualname__), theirs.value)
    elif isinstance(theirs, torch.Size):
        assert type(ours) is tuple and ours == tuple(theirs)
    elif type(theirs) in (dict, collections.OrderedDict, collections.Counter):
        assert type(ours) is type(theirs) and len(ours) == len(theirs)
        for (mine, value), (key, other) in zip(ours.items(), theirs.items(), strict=True):
            assert_same(mine, key, seen)
            assert_same(value, other, seen)
    elif type(theirs) in (list, tuple):
        assert type(ours) is type(theirs) and len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same(mine, other, seen)
    elif hasattr(theirs, "__dict__") and not isinstance(theirs, (type, float)):
        assert type(ours) is Record and ours.type.name == type(theirs).__qualname__
        if ours.type.name == "TensorProperties":  # its state is a tuple, see its __getstate__
            assert_same(ours.state[0], theirs.dtype, seen)
        else:
            assert_same(ours.fields, {k: v for k, v in vars(theirs).items() if k in ours.fields}, seen)
            assert {k for k, v in vars(theirs).items() if v is not None} <= set(ours.fields)
    else:
        assert type(ours) is type(theirs)
        assert ours == theirs or (ours != ours and theirs != theirs)


# -------------------------------------------------------------------------------------------------------- real streams


def streams_of(path):
    """The pickle streams of a file: itself, or the one in each archive that lies in it."""
    data = path.read_bytes()
    if data[:2] != b"PK":
        return [data]
    found, at = [], 0
    while at < len(data):
        end = data.index(b"PK\x05\x06", at) + 22
        archive = zipfile.ZipFile(io.BytesIO(data[at:end]))
        found.append(archive.read(next(n for n in archive.namelist() if n.endswith("/data.pkl"))))
        at = end
    return found


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.name)
def test_fixtures_read_as_pickle_reads_them(path):
    data = path.read_bytes()
    assert_same(load(data), reference(data))


def test_there_are_fixtures_with_classes_of_megatron():
    assert len(FIXTURES) >= 5
    assert any(b"MCoreMetadata" in path.read_bytes() for path in FIXTURES)
    assert any(b"MCoreSavePlan" in path.read_bytes() for path in FIXTURES)


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus is not here")
@pytest.mark.parametrize(
    "case", sorted(p.name for p in CORPUS.glob("v*")) + sorted(p.name for p in CORPUS.glob("mlm*"))
)
def test_every_file_of_the_corpus_reads_as_pickle_reads_it(case):
    paths = [p for p in (CORPUS / case).rglob("*") if p.name == ".metadata" or p.suffix in (".pt", ".distcp")]
    count = 0
    for path in paths:
        for data in streams_of(path):
            assert_same(load(data, file=path), reference(data))
            count += 1
    assert count >= 20


# ---------------------------------------------------------------------------------------------------- types of Python

KEYS = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=5) | st.binary(max_size=5)
SCALARS = (
    KEYS
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.binary(max_size=300).map(bytearray)
    | st.datetimes()
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.builds(pathlib.PurePosixPath, st.sampled_from(["/a/b", "c", "."]))
    | st.sampled_from([float("nan"), "x" * 300, 2**2000, -(2**300), range(3, 9, 2), slice(1, None)])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS | st.tuples(KEYS, KEYS), inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(collections.OrderedDict)
        | st.sets(KEYS, max_size=4)
        | st.frozensets(KEYS, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("protocol", range(6))
@given(value=VALUES)
def test_plain_values_come_back(protocol, value):
    for shared in (value, [value, value]):
        data = pickle.dumps(shared, protocol)
        made = load(data)
        assert repr(made) == repr(pickle.loads(data))
        assert_same(made, shared)
        assert repr(load(pickletools.optimize(data))) == repr(made)


@pytest.mark.parametrize("protocol", range(6))
def test_numpy_arrays_and_scalars_come_back(protocol):
    arrays = [
        np.arange(6, dtype="<u4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(3, dtype=">i2"),
        np.zeros((0, 4), np.float16),
        np.array([True, False]),
        np.array(["ab", "c"]),
        np.array([b"ab"]),
    ]
    scalars = [np.float32(1.5), np.int64(-3), np.bool_(True), np.float64("nan"), np.uint8(7), np.complex64(1j)]
    made = load(pickle.dumps((arrays, scalars), protocol))
    for ours, theirs in zip(made[0], arrays, strict=True):
        assert_same(ours, theirs)
        assert ours.array().dtype == theirs.dtype
    for ours, theirs in zip(made[1], scalars, strict=True):
        assert type(ours) is type(theirs) and (ours == theirs or math.isnan(ours))


def test_numpy_things_that_are_not_read_say_so():
    objects, structured, stamp = load(
        pickle.dumps((np.array([{}, None]), np.zeros(2, [("a", "i4"), ("b", "f8")]), np.datetime64("2024-01-01")), 4)
    )
    assert objects.data == [{}, None]
    for array in (objects, structured):
        with pytest.raises(Exception, match="not read") as error:
            array.array()
        assert error.value.exit_code == 5
    assert type(stamp) is Opaque and stamp.type.name == "scalar" and type(stamp.args[0]) is NumpyDtype


def test_random_state_of_numpy_and_python_and_torch():
    import random

    rng = [{"np": np.random.get_state(), "py": random.getstate(), "torch_like": np.random.RandomState(3)}]
    made = load(pickle.dumps(rng, 2))[0]
    assert_same(made["np"][1], np.random.get_state()[1])
    assert made["py"] == random.getstate()
    assert isinstance(made["torch_like"], Opaque)


@pytest.mark.parametrize("protocol", range(6))
def test_namespaces_and_unknown_classes_show_what_they_hold(protocol):
    data = pickle.dumps([argparse.Namespace(lr=0.1, path="x"), Unknown(3), Slotted(), Counted(a=2)], protocol)
    namespace, unknown, slotted, counted = load(data)
    assert type(namespace) is Record and namespace.type == GlobalRef("argparse", "Namespace")
    assert namespace.fields == {"lr": 0.1, "path": "x"} and namespace.get("lr") == 0.1
    assert type(unknown) is Opaque and unknown.fields == {"value": 3}
    assert unknown.type.name == "Unknown" and repr(unknown) == f"<Opaque {unknown.type}>"
    assert slotted.fields == {"left": 1, "right": [2]}
    assert type(counted) is Opaque
    assert counted.pairs == (("a", 2),) or counted.args[-1] == {"a": 2}


class Unknown:
    def __init__(self, value):
        self.value = value


class Slotted:
    __slots__ = ("left", "right")

    def __init__(self):
        self.left, self.right = 1, [2]

    def __reduce_ex__(self, protocol):
        return copyreg.__newobj__, (Slotted,), (None, {"left": self.left, "right": self.right})


class Counted(dict):
    pass


def test_torch_names_become_names_and_references():
    buffer = io.BytesIO()
    base = torch.arange(12.0)
    torch.save(
        {
            "dtype": torch.bfloat16,
            "size": torch.Size([2, 3]),
            "view": base.view(3, 4).t()[1:],
            "scalar": torch.tensor(3, dtype=torch.int32),
            "param": torch.nn.Parameter(torch.zeros(2, dtype=torch.float16)),
            "fp8": torch.zeros(4, dtype=torch.float8_e4m3fn),
            "u16": torch.zeros(4, dtype=torch.uint16),
        },
        buffer,
    )
    made = load(zipfile.ZipFile(buffer).read("archive/data.pkl"))
    assert made["dtype"] == Dtype("bfloat16") and str(made["dtype"]) == "bfloat16"
    assert made["size"] == (2, 3) and type(made["size"]) is tuple
    assert made["view"] == TensorRef(StorageRef("0", "float32", 12), "float32", 1, (3, 3), (1, 4))
    assert not made["view"].contiguous and made["scalar"].contiguous
    assert (made["scalar"].shape, made["scalar"].dtype) == ((), "int32")
    assert made["param"].parameter and made["param"].requires_grad
    assert (made["fp8"].dtype, made["fp8"].storage.dtype) == ("float8_e4m3fn", None)
    assert made["u16"].dtype == "uint16"


def test_attributes_of_a_module_state_dict_are_kept():
    state = torch.nn.Linear(1, 1).state_dict()
    assert load(pickle.dumps(collections.OrderedDict(), 2)) == collections.OrderedDict()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    made = load(zipfile.ZipFile(buffer).read("archive/data.pkl"))
    assert list(made) == ["weight", "bias"]
    assert made._metadata == state._metadata


# ------------------------------------------------------------------------------------------------------------ the rest


def test_every_opcode_has_a_handler():
    for opcode in pickletools.opcodes:
        assert OPCODES[ord(opcode.code)] is not _unknown or opcode.name == "STOP", opcode.name
    known = {ord(opcode.code) for opcode in pickletools.opcodes}
    assert all(OPCODES[code] is _unknown for code in range(256) if code not in known)


def test_the_first_of_several_streams():
    first, second = pickle.dumps([1, 2]), pickle.dumps("x")
    value, end = load_first(first + second)
    assert (value, end) == ([1, 2], len(first))
    assert load(memoryview(first + second)[end:]) == "x"
    with pytest.raises(CorruptError, match="bytes follow"):
        load(first + second)


def test_errors_name_the_file():
    with pytest.raises(CorruptError, match=r"^run/\.metadata: the pickle "):
        load(b"", file="run/.metadata")


def test_records_are_read_only():
    record = load(pickle.dumps(argparse.Namespace(a=1)))
    with pytest.raises(AttributeError):
        record.state = {}
    with pytest.raises(AttributeError):
        record.other = 1


def test_reading_imports_neither_torch_nor_pickle_nor_what_the_stream_names():
    code = (
        "import sys\n"
        "from zero1ckpt.encodings.inert_pickle import load\n"
        f"load(open({str(FIXTURES[0])!r}, 'rb').read())\n"
        "assert not {'torch', 'argparse'} & set(sys.modules), sorted(sys.modules)\n"
        "assert load(b'cfoo.bar\\nBaz\\n.') == ('foo.bar', 'Baz')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)


def test_dates_survive_without_their_zone_being_run():
    zone = datetime.timezone.utc
    made = load(pickle.dumps(datetime.datetime(2024, 5, 6, tzinfo=zone)))
    assert type(made) is Opaque and made.type.name == "datetime"
