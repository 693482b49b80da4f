"""Loading libraries and generated wrappers."""

from __future__ import annotations

import inspect
import os
import sys
import traceback

import pytest

from opforge.errors import BuildError
from opforge.runtime.build.compiler import compile_cpp, compiled
from opforge.runtime.config import Config
from opforge.runtime.execute.load import build_library, load_file, load_library, load_wrapper

NUMBER = 'extern "C" __attribute__((visibility("default"))) int number() { return 7; }\n'


def test_library_is_loaded_once(tmp_path):
    cfg = Config(cache_dir=str(tmp_path), opt_level="0")
    path = compile_cpp(NUMBER, name="k", cfg=cfg)
    assert load_library(path) is load_library(str(path))
    assert build_library(NUMBER, name="k", cfg=cfg) is load_library(path)
    assert load_library(path).number() == 7


def _other(number):
    return NUMBER.replace("7", str(number))


def test_library_is_loaded_from_what_was_verified(tmp_path):
    """Whatever has the name by then."""
    cfg = Config(cache_dir=str(tmp_path), opt_level="0")
    entry, file = compiled(NUMBER, name="k", cfg=cfg)
    other = compile_cpp(_other(8), name="k", cfg=cfg).read_bytes()
    descriptor = entry.open(file)
    try:
        entry.file(file).unlink()
        entry.file(file).write_bytes(other)
        assert load_library(entry.file(file), descriptor).number() == 7
    finally:
        os.close(descriptor)


def test_libraries_of_one_descriptor_are_told_apart(tmp_path):
    """The loader knows libraries by the names that it was given, and numbers of descriptors come again."""
    cfg = Config(cache_dir=str(tmp_path), opt_level="0")
    found = [load_file(*compiled(_other(n), name="k", cfg=cfg)) for n in range(20)]
    assert [library.number() for library in found] == [*range(20)]
    assert len({library._name.rsplit("/", 1)[1] for library in found}) == 1, "this is about one descriptor"


def test_file_that_was_changed_is_not_loaded(tmp_path):
    cfg = Config(cache_dir=str(tmp_path), opt_level="0")
    entry, file = compiled(NUMBER, name="k", cfg=cfg)
    with entry.file(file).open("ab") as library:
        library.write(b"more")
    with pytest.raises(BuildError, match="not the content that the manifest lists"):
        load_file(entry, file)


def test_links_and_pipes_are_not_opened(tmp_path):
    cfg = Config(cache_dir=str(tmp_path), opt_level="0")
    entry, file = compiled(NUMBER, name="k", cfg=cfg)
    path, elsewhere = entry.file(file), tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(OSError, match="is not a plain file"):
        entry.read(file)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="is not a plain file"):
        entry.read(file)


def test_library_that_is_none(tmp_path):
    (tmp_path / "x.so").write_bytes(b"no library")
    with pytest.raises(BuildError, match=r"x\.so cannot be loaded"):
        load_library(tmp_path / "x.so")


def test_wrapper_from_source():
    module = load_wrapper("def call(x):\n    return x + offset\n", "graph_0", {"offset": 2})
    assert module.call(1) == 3
    assert module.__name__ == "graph_0"
    assert "graph_0" not in sys.modules
    assert inspect.getsource(module.call) == "def call(x):\n    return x + offset\n"


def test_wrapper_from_file_writes_no_bytecode(tmp_path):
    (tmp_path / "wrapper.py").write_text("from __future__ import annotations\nvalue = 'é'\n")
    module = load_wrapper(tmp_path / "wrapper.py", "w")
    assert module.value == "é"
    assert module.__file__ == str(tmp_path / "wrapper.py")
    assert [p.name for p in tmp_path.iterdir()] == ["wrapper.py"]


def test_traceback_shows_the_wrappers_line():
    module = load_wrapper("def call(x):\n    return 1 / x  # the line\n", "graph 1")
    with pytest.raises(ZeroDivisionError) as caught:
        module.call(0)
    text = "".join(traceback.format_exception(caught.value))
    assert "return 1 / x  # the line" in text
    assert module.__file__ in text


def test_same_names_with_other_source_are_apart():
    one, two = load_wrapper("x = 1\n", "same"), load_wrapper("x = 2\n", "same")
    assert (one.x, two.x) == (1, 2)
    assert one.__file__ != two.__file__


def test_wrapper_is_not_changed_by_this_modules_future_imports():
    module = load_wrapper("def f(x: int): pass\n", "plain")
    assert module.f.__annotations__ == {"x": int}
