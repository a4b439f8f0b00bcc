"""Streams made to attack: each is refused in bounded time and memory, by an error of exit code 4, and runs nothing.

Streams are written by hand, opcode by opcode, so that each holds exactly the trick that names it.
"""

import argparse
import builtins
import copyreg
import os
import pickle
import resource
import struct
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero1ckpt.core.errors import CorruptError
from zero1ckpt.encodings.inert_pickle import Opaque, load
from zero1ckpt.encodings.inert_pickle.policy import checked_global

FIXTURES = sorted((Path(__file__).resolve().parents[1] / "data/pickles").iterdir())


def text(value):
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def named(module, name):
    """``STACK_GLOBAL``."""
    return text(module) + text(name) + b"\x93"


def call(function, *args):
    return function + b"(" + b"".join(args) + b"tR"


CANARY = "canary"
HOSTILE_CALLS = {
    "os.system": b"cos\nsystem\n(" + text(f"touch {CANARY}") + b"tR.",
    "posix.system": b"cposix\nsystem\n(" + text(f"touch {CANARY}") + b"tR.",
    "nt.system": call(named("nt", "system"), text(f"touch {CANARY}")) + b".",
    "os.popen": call(named("os", "popen"), text(f"touch {CANARY}")) + b".",
    "subprocess.Popen": call(named("subprocess", "Popen"), text(f"touch {CANARY}")) + b".",
    "subprocess.check_output": call(named("subprocess", "check_output"), text(f"touch {CANARY}")) + b".",
    "builtins.eval": call(named("builtins", "eval"), text(f"open('{CANARY}','w')")) + b".",
    "builtins.exec": call(named("builtins", "exec"), text(f"open('{CANARY}','w')")) + b".",
    "builtins.open": call(named("builtins", "open"), text(CANARY), text("w")) + b".",
    "builtins.compile": call(named("builtins", "compile"), text("1"), text("a"), text("eval")) + b".",
    "builtins.__import__": call(named("builtins", "__import__"), text("antigravity")) + b".",
    "builtins.getattr": call(named("builtins", "getattr"), text("a"), text("upper")) + b".",
    "__builtin__.eval": b"c__builtin__\neval\n(" + text(f"open('{CANARY}','w')") + b"tR.",
    "__builtin__.apply": b"c__builtin__\napply\n(tR.",
    "sys.exit": call(named("sys", "exit")) + b".",
    "sys.modules": named("sys", "modules") + b".",
    "importlib.import_module": call(named("importlib", "import_module"), text("antigravity")) + b".",
    "runpy.run_path": call(named("runpy", "run_path"), text("x.py")) + b".",
    "runpy._run_code": call(named("runpy", "_run_code"), text("x")) + b".",
    "pty.spawn": call(named("pty", "spawn"), text("sh")) + b".",
    "socket.create_connection": call(named("socket", "create_connection"), b")") + b".",
    "shutil.rmtree": call(named("shutil", "rmtree"), text("x")) + b".",
    "ctypes.CDLL": call(named("ctypes", "CDLL"), text("libc.so.6")) + b".",
    "operator.attrgetter": call(named("operator", "attrgetter"), text("a")) + b".",
    "operator.methodcaller": call(named("operator", "methodcaller"), text("a")) + b".",
    "_operator.attrgetter": call(named("_operator", "attrgetter"), text("a")) + b".",
    "functools.partial": call(named("functools", "partial"), named("builtins", "print")) + b".",
    "functools.reduce": call(named("functools", "reduce")) + b".",
    "webbrowser.open": call(named("webbrowser", "open"), text("http://localhost")) + b".",
    "code.InteractiveInterpreter": call(named("code", "InteractiveInterpreter")) + b".",
    "codecs.open": call(named("codecs", "open"), text(CANARY), text("w")) + b".",
    "_codecs.lookup": call(named("_codecs", "lookup"), text("x")) + b".",
    "torch.load": call(named("torch", "load"), text("x")) + b".",
    "torch.serialization.load": call(named("torch.serialization", "load"), text("x")) + b".",
    "torch.hub.load": call(named("torch.hub", "load"), text("x")) + b".",
    "torch.jit.load": call(named("torch.jit", "load"), text("x")) + b".",
    "numpy.load": call(named("numpy", "load"), text("x")) + b".",
    "numpy.testing._private.utils.runstring": named("numpy.testing._private.utils", "runstring") + b".",
    "pickle.loads": call(named("pickle", "loads"), text("x")) + b".",
    "_pickle.loads": call(named("_pickle", "loads"), text("x")) + b".",
    "dill.loads": call(named("dill", "loads"), text("x")) + b".",
    "joblib.load": call(named("joblib", "load"), text("x")) + b".",
    "marshal.loads": call(named("marshal", "loads"), text("x")) + b".",
    "types.FunctionType": call(named("types", "FunctionType")) + b".",
    "types.CodeType": call(named("types", "CodeType")) + b".",
    "pip.main": call(named("pip", "main"), text("x")) + b".",
    "pip._internal.main": call(named("pip._internal", "main"), text("x")) + b".",
    "timeit.timeit": call(named("timeit", "timeit"), text("1")) + b".",
    "bdb.Bdb": call(named("bdb", "Bdb")) + b".",
    "pdb.run": call(named("pdb", "run"), text("1")) + b".",
    "cProfile.run": call(named("cProfile", "run"), text("1")) + b".",
    "pydoc.pipepager": call(named("pydoc", "pipepager"), text("1")) + b".",
    "threading.Thread": call(named("threading", "Thread")) + b".",
    "multiprocessing.Process": call(named("multiprocessing", "Process")) + b".",
    "signal.raise_signal": call(named("signal", "raise_signal"), b"K\x09") + b".",
    "signal.signal": call(named("signal", "signal"), b"K\x09", b"K\x00") + b".",
    "pathlib.Path.write_text": named("pathlib", "Path.write_text") + b".",
    # a qualified name may walk from a harmless module to a hostile one, or to the interpreter
    "torch.serialization.os.system": named("torch.serialization", "os.system") + b".",
    "collections.abc.sys.modules": named("collections", "abc.sys.modules") + b".",
    "argparse.Namespace.__init__.__globals__": named("argparse", "Namespace.__init__.__globals__") + b".",
    "collections.OrderedDict.__reduce__": named("collections", "OrderedDict.__reduce__") + b".",
    "six.moves.builtins.eval": named("six.moves.builtins", "eval") + b".",
    "megatron.core.os.system": named("megatron.core.os", "system") + b".",
    "torch.__builtins__.anything": named("torch.__builtins__", "anything") + b".",
    # other opcodes that call
    "os.execv": b"(" + text("sh") + b"ios\nexecv\n.",  # INST
    "os.kill": b"(cos\nkill\nK\x01o.",  # OBJ
    "os.abort": b"cos\nabort\n)\x81.",  # NEWOBJ
    "os._exit": b"cos\n_exit\n)}\x92.",  # NEWOBJ_EX
    "os.getcwd": b"cos\ngetcwd\n(t0N.",  # named, never called, and popped
    "os.getenv": b"(cos\ngetenv\n1N.",  # popped with its mark
    "os.rename": b"\x80\x04]\x94(cos\nrename\ne0N.",  # in a list that is thrown away
}
DEEPER = {
    # name: (stream, what the error says)
    "reduce of a reduce": (
        call(call(named("foo", "maker"), text("os")), text("system")) + b".",
        "what is not a global .*the result of foo.maker",
    ),
    "reduce of an instance": (b"cargparse\nNamespace\n)\x81)R.", "the result of argparse.Namespace"),
    "reduce of text": (text("os.system") + b")R.", "not a global .*str"),
    "reduce of a dtype": (b"ctorch\nfloat32\n)R.", "not a global .*Dtype"),
    "arguments that are no tuple": (b"cfoo\nBar\n]R.", "not a global"),
    "new object of no class": (b"K\x01)\x81.", "not a global .*int"),
    "setstate with a callable": (b"ctorch\nSize\n)R}" + text("__setstate__") + b"cos\nsystem\nsb.", "os.system"),
    "setstate on a plain value": (b"}}" + text("__setstate__") + b"cfoo\nbar\nsb.", "takes none"),
    "setstate on a class": (b"cfoo\nBar\n}" + text("__setstate__") + b"cfoo\nbar\nsb.", "takes none .*GlobalRef"),
    "slot state on a class": (b"cargparse\nNamespace\nN}" + text("a") + b"K\x01s\x86b.", "takes none .*GlobalRef"),
    "state given twice": (b"cargparse\nNamespace\n)\x81}b}b.", "state twice"),
    "attributes of an OrderedDict": (b"ccollections\nOrderedDict\n)R}" + text("items") + b"K\x01sb.", "attributes"),
    "extension 1": (b"\x82\x01.", "extension registry"),
    "extension 2": (b"\x83\x01\x01.", "extension registry"),
    "extension 4": (b"\x84\x01\x01\x01\x01.", "extension registry"),
    "persistent id of protocol 0": (b"P/etc/passwd\n.", "persistent id"),
    "persistent id of another kind": (text("/etc/passwd") + b"Q.", "persistent id"),
    "storage of a class that is none": (
        b"(" + text("storage") + b"cfoo\nBar\n" + text("0") + text("cpu") + b"K\x01tQ.",
        "unknown class .*foo.Bar",
    ),
    "storage of negative size": (
        b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"J\xff\xff\xff\xfftQ.",
        "malformed reference",
    ),
    "buffer outside of the stream": (b"\x97.", "buffer outside"),
    "read-only buffer of text": (text("a") + b"\x98.", "read-only"),
    "codec that runs code": (call(named("_codecs", "encode"), text("a"), text("zlib")) + b".", "_codecs.encode"),
    "bytes of a count": (call(named("builtins", "bytearray"), b"J\xff\xff\xff\x7f") + b".", "builtins.bytearray"),
    "array of a count": (
        call(named("numpy.core.multiarray", "_reconstruct"), b"J\xff\xff\xff\x7f") + b".",
        "_reconstruct",
    ),
    "copyreg by another name": (call(named("copyreg", "pickle"), named("foo", "Bar"), b"N") + b".", "copyreg.pickle"),
    "hidden line break": (b"cfoo\rbar\nBaz\n.", "cannot exist"),
    "name with a space": (named("foo", "Bar baz") + b".", "cannot exist"),
    "empty name": (named("foo", "") + b".", "cannot exist"),
    "empty part of a name": (named("foo", "a..b") + b".", "cannot exist"),
    "name of ten thousand letters": (named("foo", "a" * 10_000) + b".", "cannot exist"),
    "name that is a number": (b"K\x01" + text("a") + b"\x93.", "not text"),
    # stack and memo games
    "empty stream": (b"", "damaged"),
    "no stop": (b"N", "damaged"),
    "stop without a value": (b".", "left on its stack"),
    "two values left": (b"NN.", "left on its stack"),
    "open mark": (b"(N.", "left on its stack"),
    "tuple below the stack": (b"N\x86.", "damaged"),
    "tuple across a mark": (b"NN(\x86.", "damaged"),
    "append across a mark": (b"](N(a.", "damaged"),
    "reduce across a mark": (b"cfoo\nBar\n)(R.", "damaged"),
    "mark that is not there": (b"Nt.", "damaged"),
    "memo that is not there": (b"h\x05.", "damaged"),
    "memo number below zero": (b"N" + b"p0\n0g-1\n.", "memo number"),
    "memoize of nothing": (b"\x94N.", "damaged"),
    "memo number of a thousand digits": (b"Np" + b"9" * 1000 + b"\n.", "memo number"),
    "list that holds itself": (b"]\x94h\x00a.", "holds itself"),
    "dict that holds itself": (b"}\x94" + text("a") + b"h\x00s.", "holds itself"),
    "object that holds itself": (b"cargparse\nNamespace\n)\x81\x94}" + text("a") + b"h\x00sb.", "holds itself"),
    "tuple in itself": (b"]\x94h\x00\x85a.", "holds itself"),
    "arguments in itself": (b"]\x94cfoo\nBar\nh\x00\x85Ra.", "holds itself"),
    "key twice": (b"}" + text("a") + b"N" + b"s" + text("a") + b"Ns.", "twice"),
    "key twice at once": (b"}(" + (text("a") + b"N") * 2 + b"u.", "twice"),
    "key without a value": (b"}(" + text("a") + b"u.", "without a value"),
    "key that is a list": (b"}]Ns.", "key that cannot be one"),
    "key that holds a list": (b"}]\x85Ns.", "key that cannot be one"),
    "set of lists": (b"\x8f(]\x90.", "key that cannot be one"),
    "items of a tuple": (b")" + text("a") + b"Ns.", "not a dict"),
    "append to a tuple": (b")Na.", "not a list"),
    "unknown opcode": (b"\xff.", "unknown opcode"),
    "protocol 6": (b"\x80\x06N.", "unknown protocol"),
    "text that is not UTF-8": (b"\x8c\x01\xff.", "damaged"),
    "lone surrogate": (b"V\\ud800\n.", "damaged"),
    "string without quotes": (b"Sabc\n.", "without quotes"),
    "date that is none": (call(named("datetime", "date"), b"C\x04\x00\x00\x00\x00") + b".", "damaged"),
    # lengths and bombs
    "text longer than the stream": (b"X\xff\xff\xff\xffa.", "more bytes than there are"),
    "bytes longer than the stream": (b"B\xff\xff\xff\xffa.", "more bytes than there are"),
    "bytes of 2**63": (b"\x8e" + b"\xff" * 8 + b"a.", "more bytes than there are"),
    "bytearray of 2**62": (b"\x96" + b"\xff" * 7 + b"\x3fa.", "more bytes than there are"),
    "text of 2**62": (b"\x8d" + b"\xff" * 7 + b"\x3fa.", "more bytes than there are"),
    "frame longer than the stream": (b"\x80\x04\x95" + b"\xff" * 8 + b"N.", "more bytes than there are"),
    "integer of 2 GB": (b"\x8b\xff\xff\xff\x7f\x01.", "integer that is too long"),
    "integer of negative length": (b"\x8b\xff\xff\xff\xff\x01.", "integer that is too long"),
    "integer of 100,000 digits": (b"L" + b"9" * 100_000 + b"L\n.", "too long number"),
    "float of 100,000 digits": (b"F" + b"9" * 100_000 + b"\n.", "too long number"),
    "string of negative length": (b"T\xff\xff\xff\xffa.", "negative length"),
    "huge memo number is no array": (b"Nr\xff\xff\xff\xff0h\x00.", "damaged"),
    "nested lists": (b"]" * 5000 + b"a" * 4999 + b".", "nested too deeply"),
    "nested tuples": (b")" + b"\x85" * 1_000_000 + b".", "nested too deeply"),
    "nested dicts": (b"}" + (text("a") + b"}") * 5000 + b"s" * 5000 + b".", "nested too deeply"),
    "nested objects": (b")" + (b"\x940cfoo\nBar\nh\x00R" + b"\x85") + b"\x85" * 5000 + b".", "nested too deeply"),
    "nested tuple as a key": (b"})" + b"\x85" * 1_000_000 + b"Ns.", "tuples as keys"),
    "tuple that doubles, as a key": (b"})" + b"2\x86" * 60 + b"Ns.", "tuples as keys"),
    "doubling tuples": (b")" + b"2\x86" * 60 + b".", "endless to walk"),
    "doubling lists": (b"N" + b"\x940](h\x00h\x00e" + b"".join(
        b"\x940](" + b"h" + bytes([i]) + b"h" + bytes([i]) + b"e" for i in range(1, 60)
    ) + b".", "endless to walk"),
    "doubling objects": (b"cfoo\nBar\n\x940N\x940" + b"".join(
        b"h\x00h" + bytes([i]) + b"h" + bytes([i]) + b"\x86R\x940" for i in range(1, 60)
    ) + b"h\x3c.", "endless to walk"),
    "a list copied again and again": (
        b"](" + b"N" * 50_000 + b"e\x940" + b"(" + (b"cbuiltins\nlist\nh\x00\x85R") * 50_000 + b"l.",
        "memory bomb",
    ),
    "bytes copied again and again": (
        b"B" + struct.pack("<I", 1 << 20) + b"a" * (1 << 20) + b"\x940("
        + b"cbuiltins\nbytearray\nh\x00\x85R" * 10_000 + b"l.",
        "memory bomb",
    ),
    "integers whose hashes collide": (
        b"}(" + b"".join(
            b"\x8a\x0a" + ((2**61 - 1) * i).to_bytes(10, "little") + b"N" for i in range(1, 100_000)
        ) + b"u.",
        "too large a number",
    ),
    "tuples whose hashes collide": (
        b"}(" + b"".join(
            b"(" + b"".join(b"J" + struct.pack("<i", -1 - (i >> bit & 1)) for bit in range(17)) + b"tN"
            for i in range(1 << 15)
        ) + b"u.",
        "tuples as keys",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_happens(tmp_path, monkeypatch):
    """No file appears, no module is imported, nothing is registered, whatever a stream asks for."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules), dict(vars(builtins)), dict(copyreg.dispatch_table), dict(vars(argparse.Namespace))
    yield
    assert os.listdir(tmp_path) == []
    assert {name for name in set(sys.modules) - before[0] if "antigravity" in name or name == "foo"} == set()
    assert (dict(vars(builtins)), dict(copyreg.dispatch_table)) == before[1:3]
    assert dict(vars(argparse.Namespace)) == before[3]


@pytest.mark.parametrize("name", HOSTILE_CALLS)
def test_a_hostile_global_is_named_and_refused(name):
    with pytest.raises(CorruptError, match="can run code") as error:
        load(HOSTILE_CALLS[name], file="a/.metadata")
    assert name.rsplit(".", 1)[-1] in str(error.value) and name in str(error.value)
    assert str(error.value).startswith("a/.metadata: ") and "\n" not in str(error.value)
    assert error.value.exit_code == 4


@pytest.mark.parametrize("name", DEEPER)
def test_a_trick_is_refused(name):
    stream, message = DEEPER[name]
    start = time.process_time()
    with pytest.raises(CorruptError, match=message) as error:
        load(stream)
    assert time.process_time() - start < 10
    assert error.value.exit_code == 4 and len(str(error.value)) < 500 and "\n" not in str(error.value)


def test_most_of_the_hostile_streams_do_run_in_pickle(tmp_path):
    """The canary proves that the streams are real: the standard unpickler creates it."""
    pickle.loads(HOSTILE_CALLS["os.system"])
    assert (tmp_path / CANARY).exists()
    (tmp_path / CANARY).unlink()
    pickle.loads(HOSTILE_CALLS["builtins.open"]).close()
    assert (tmp_path / CANARY).exists()
    (tmp_path / CANARY).unlink()


def test_unknown_globals_are_shown_by_name_and_not_called():
    stream = call(named("foo.bar", "Baz"), text("touch"), call(named("qux", "make"), b"K\x01")) + b"."
    made = load(stream)
    assert type(made) is Opaque and str(made.type) == "foo.bar.Baz" and made.how == "call"
    assert made.args[0] == "touch" and repr(made.args[1]) == "<Opaque qux.make>"


@pytest.mark.parametrize(
    "limits",
    [{"max_bytes": 100}, {"max_opcodes": 100}, {"max_depth": 3}, {"max_nodes": 50}],
    ids=lambda limits: next(iter(limits)),
)
def test_each_limit_can_be_lowered(limits):
    stream = pickle.dumps([[[[list(range(100))]]]])
    assert load(stream) == [[[[list(range(100))]]]]
    with pytest.raises(CorruptError, match=r"limit|deeply|endless"):
        load(stream, **limits)


def test_harmless_neighbours_of_hostile_names():
    for module, name in [
        ("signal", "Signals"), ("signal", "SIGTERM"), ("builtins", "ValueError"), ("_codecs", "encode"),
        ("__main__", "Config"), ("megatron.core.enums", "ModelType"), ("torch.distributed.checkpoint.planner", "X"),
        ("my.types", "Thing"), ("numpy.random._pickle", "__randomstate_ctor"), ("re", "_compile"),
        ("transformer_engine.common.recipe", "DelayedScaling"), ("io", "BytesIO"),
    ]:  # fmt: skip
        assert str(checked_global(module, name)) == f"{module}.{name}"


def test_memory_is_linear_in_the_stream():
    worst = [b"]", b"}", b"(", b"\x8f", b")", b"]\x94", b"}(", b"ccollections\nOrderedDict\n)R", b"h\x00)\x81"]
    for opcodes in worst:
        stream = b"cfoo\nBar\n\x940" + opcodes * (80_000 // len(opcodes))
        tracemalloc.start()
        with pytest.raises(CorruptError):
            load(stream)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 250 * len(stream), (opcodes, peak / len(stream))


# ----------------------------------------------------------------------------------------------------------------- fuzz

OPCODE_PIECES = st.sampled_from(
    [bytes([code]) for code in range(256)]
    + [text("a"), text("items"), b"K\x01", b"J\xff\xff\xff\xff", b"cos\nsystem\n", b"cfoo\nBar\n", b"ctorch\nSize\n"]
    + [b"cargparse\nNamespace\n", b"ccollections\nOrderedDict\n", b"cnumpy\ndtype\n", b"h\x00", b"q\x00", b"\x8c\x02u4"]
    + [b"cnumpy.core.multiarray\n_reconstruct\n", b"cnumpy.core.multiarray\nscalar\n", b"C\x04abcd", b"(", b"t", b"R"]
    + [b"cbuiltins\nset\n", b"cbuiltins\nrange\n", b"cdatetime\ndatetime\n", b"c_codecs\nencode\n", b"\x8c\x06latin1"]
    + [b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nFloatStorage\n", text("storage"), b"Q", b"b", b"e", b"u", b")"]
)


@settings(max_examples=400)
@given(st.lists(OPCODE_PIECES, max_size=40))
def test_any_opcodes_give_a_value_or_one_error(pieces):
    check_harmless(b"".join(pieces) + b".")


@settings(max_examples=100)
@given(st.sampled_from(FIXTURES), st.data())
def test_mutated_real_streams_give_a_value_or_one_error(path, data):
    stream = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(stream) - 1))
        kind = data.draw(st.sampled_from(["flip", "opcode", "cut", "double", "drop"]))
        if kind == "flip":
            stream[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "opcode":
            stream[at:at] = data.draw(OPCODE_PIECES)
        elif kind == "cut":
            del stream[at + 1 :]
        elif kind == "double":
            stream[at:at] = stream[at : at + data.draw(st.integers(1, 200))]
        else:
            del stream[at : at + data.draw(st.integers(1, 200))]
        if not stream:
            break
    check_harmless(bytes(stream))


def check_harmless(stream):
    start = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    try:
        load(stream, max_opcodes=100_000)
    except CorruptError as error:
        assert "\n" not in str(error)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - start < 10
