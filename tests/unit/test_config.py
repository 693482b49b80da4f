"""The effective configuration: where values come from, what is refused, and what reaches cache keys."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import warnings
from pathlib import Path

import pytest

from opforge.errors import ConfigError, OpforgeWarning
from opforge.generated.targets import CPU_TARGETS
from opforge.runtime import config


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    for setting in config.FIELDS.values():
        monkeypatch.delenv(setting.env, raising=False)
    config.reset()
    yield
    config.reset()


def test_defaults_are_the_specs():
    cfg = config.current()
    for setting in config.FIELDS.values():
        assert getattr(cfg, setting.field) == setting.default
    assert {f.name for f in dataclasses.fields(cfg)} == {s.field for s in config.FIELDS.values()}


def test_every_default_is_accepted_as_a_value_and_as_text():
    for setting in config.FIELDS.values():
        with config.patch({setting.name: setting.default}), config.patch({setting.name: str(setting.default)}) as cfg:
            assert getattr(cfg, setting.field) == setting.default
            assert type(getattr(cfg, setting.field)) is type(setting.default)


def test_environment_is_read_once(monkeypatch):
    monkeypatch.setenv("OPFORGE_STRICT", "yes")
    monkeypatch.setenv("OPFORGE_DEBUG_VERIFY", "1")
    monkeypatch.setenv("OPFORGE_BUILD_JOBS", "3")
    monkeypatch.setenv("OPFORGE_BUILD_TIMEOUT_S", "1.5")
    monkeypatch.setenv("OPFORGE_TARGET", "avx2")
    monkeypatch.setenv("OPFORGE_CACHE_DIR", "~/somewhere")
    cfg = config.current()
    assert (cfg.strict, cfg.debug_verify, cfg.build_jobs, cfg.build_timeout_s) == (True, True, 3, 1.5)
    assert cfg.target == "avx2"
    assert cfg.cache_dir == str(Path.home() / "somewhere")
    monkeypatch.setenv("OPFORGE_STRICT", "no")
    assert config.current().strict is True


def test_wrong_environment_value_names_the_variable(monkeypatch):
    monkeypatch.setenv("OPFORGE_TARGET", "avx521")
    choices = ", ".join(repr(name) for name in ("auto", *sorted(CPU_TARGETS)))
    expected = f"environment variable OPFORGE_TARGET is 'avx521'; expected one of {choices}; did you mean 'avx512'?"
    with pytest.raises(ConfigError) as caught:
        config.current()
    assert str(caught.value) == expected


def test_misspelt_environment_variable_warns(monkeypatch):
    monkeypatch.setenv("OPFORGE_STRICTT", "1")
    with pytest.warns(OpforgeWarning, match=r"OPFORGE_STRICTT is no opforge setting; did you mean OPFORGE_STRICT\?"):
        config.current()


def test_unrelated_environment_variable_is_left_alone(monkeypatch):
    monkeypatch.setenv("OPFORGE_MY_OWN_THING", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config.current()


def test_patch_takes_both_spellings_nests_and_restores():
    with config.patch({"debug.verify": True}, strict=True) as outer:
        assert outer.debug_verify
        assert outer.strict
        with config.patch(debug_verify=False):
            assert not config.current().debug_verify
            assert config.current().strict
        assert config.current() is outer
    assert config.current() == config.Config()


def test_patch_restores_after_an_error():
    with pytest.raises(ZeroDivisionError), config.patch(strict=True):
        raise ZeroDivisionError
    assert not config.current().strict


def test_patch_decorates():
    @config.patch(strict=True)
    def inside():
        return config.current().strict

    assert inside()
    assert inside()
    assert not config.current().strict


def test_patch_holds_for_its_own_thread_only():
    seen = []
    with config.patch(strict=True):
        thread = threading.Thread(target=lambda: seen.append(config.current().strict))
        thread.start()
        thread.join()
    assert seen == [False]


def test_patch_holds_for_its_own_task_only():
    async def patched(jobs):
        with config.patch(build_jobs=jobs):
            await asyncio.sleep(0)
            return config.current().build_jobs

    async def all_at_once():
        return await asyncio.gather(*(patched(n) for n in range(1, 6)))

    assert asyncio.run(all_at_once()) == [1, 2, 3, 4, 5]


def test_configure_holds_for_all_threads():
    config.configure({"debug.verify": True})
    config.configure(build_jobs=7)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(config.current()))
    thread.start()
    thread.join()
    assert seen[0].debug_verify
    assert seen[0].build_jobs == 7


def test_options_win_over_mode_and_patch():
    with config.patch(reuse_workspace=False, build_jobs=2):
        assert config.from_options(None, None) == config.current()
        assert config.from_options(mode="reduce-overhead").reuse_workspace is True
        cfg = config.from_options({"reuse_workspace": 0, "debug.verify": 1}, "reduce-overhead")
        assert (cfg.reuse_workspace, cfg.debug_verify, cfg.build_jobs) == (False, True, 2)


@pytest.mark.parametrize(
    ("options", "mode", "message"),
    [
        ({"debug.verfy": 1}, None, "options: unknown setting 'debug.verfy'; did you mean 'debug.verify'?"),
        ({"zzz": 1}, None, "options: unknown setting 'zzz'"),
        ({7: 1}, None, "options: unknown setting 7"),
        (["strict"], None, "options: expected a dict of settings, like {'strict': True}; got ['strict']"),
        (None, "fast", "unknown mode 'fast'; modes are "),
        (None, ["max-autotune"], "unknown mode ['max-autotune']; did you mean"),
        (None, "max-autotun", "unknown mode 'max-autotun'; did you mean 'max-autotune'?; modes are "),
        (
            {"strict": "maybe"},
            None,
            "options: setting 'strict' is 'maybe'; expected a bool (or 1/0, true/false, yes/no, on/off)",
        ),
        ({"strict": 2}, None, "options: setting 'strict' is 2; expected a bool"),
        ({"strict": None}, None, "options: setting 'strict' is None; expected a bool"),
        ({"build_jobs": -1}, None, "options: setting 'build_jobs' is -1; expected an integer, 0 or more"),
        ({"build_jobs": True}, None, "options: setting 'build_jobs' is True; expected an integer, 0 or more"),
        ({"build_jobs": 1.5}, None, "options: setting 'build_jobs' is 1.5; expected an integer, 0 or more"),
        ({"build_jobs": "two"}, None, "options: setting 'build_jobs' is 'two'; expected an integer, 0 or more"),
        ({"build_timeout_s": "nan"}, None, "options: setting 'build_timeout_s' is 'nan'; expected a number, 0 or more"),
        ({"build_timeout_s": "x"}, None, "options: setting 'build_timeout_s' is 'x'; expected a number, 0 or more"),
        ({"cxx": 3}, None, "options: setting 'cxx' is 3; expected a string"),
        ({"cache_dir": 3}, None, "options: setting 'cache_dir' is 3; expected a path, as a string or os.PathLike"),
        ({"opt_level": 7}, None, "options: setting 'opt_level' is 7; expected one of '0', '1', '2', '3'"),
        ({"random": "eagr"}, None, "expected one of 'philox', 'eager'; did you mean 'eager'?"),
    ],
)
def test_wrong_options(options, mode, message):
    with pytest.raises(ConfigError) as caught:
        config.from_options(options, mode)
    assert message in str(caught.value)


def test_wrong_configure_changes_nothing():
    with pytest.raises(ConfigError, match=r"configure: unknown setting 'nope'"):
        config.configure(strict=True, nope=1)
    assert not config.current().strict


def test_values_are_normalized(tmp_path):
    with config.patch(cache_dir=tmp_path, opt_level=2, build_timeout_s=3) as cfg:
        assert cfg.cache_dir == str(tmp_path)
        assert cfg.opt_level == "2"
        assert (cfg.build_timeout_s, type(cfg.build_timeout_s)) == (3.0, float)


def test_key_holds_exactly_the_settings_that_change_code():
    base = config.key(config.current())
    assert base.splitlines() == sorted(base.splitlines())
    other = {
        "bool": lambda d: not d,
        "int": lambda d: d + 1,
        "float": lambda d: d + 1,
        "part": lambda d: d / 2,
        "str": lambda d: d + "x",
    }
    for setting in config.FIELDS.values():
        if setting.type == "choice":
            value = next(c for c in setting.choices if c != setting.default)
        else:
            value = other.get(setting.type, lambda d: d + "/x")(setting.default)
        with config.patch({setting.name: value}) as cfg:
            assert (config.key(cfg) != base) == (setting.affects == "code"), setting.name


def test_a_setting_that_is_assigned_is_an_error_that_says_what_to_call():
    """`opforge.config.strict = True` set an attribute of the module, and did nothing."""
    for name in ("strict", "debug_verify"):
        with pytest.raises(ConfigError) as caught:
            setattr(config, name, True)
        assert str(caught.value) == (
            f"opforge.config.{name} = ... sets nothing; call opforge.config.configure({name}=...) for the whole process, "
            f"or use `with opforge.config.patch({name}=...):`"
        )
        assert not hasattr(config, name)
    assert config.current() == config.Config()


def test_an_unknown_name_that_is_assigned_names_the_nearest_setting():
    with pytest.raises(
        ConfigError, match=r"unknown setting 'strickt'; did you mean 'strict'\?; call .*configure\(name=\.\.\.\)"
    ):
        config.strickt = True
    with pytest.raises(ConfigError, match=r"unknown setting 'zzz'; settings are strict, fusion, .*patch\(name="):
        config.zzz = 1


def test_a_setting_that_is_read_from_the_module_says_where_it_is():
    with pytest.raises(AttributeError, match=r"read opforge\.config\.current\(\)\.strict"):
        _ = config.strict
    with pytest.raises(AttributeError, match=r"no attribute 'configur'; did you mean 'configure'\?"):
        _ = config.configur


def test_what_the_module_has_can_be_replaced(monkeypatch):
    monkeypatch.setattr(config, "current", lambda: "mine")
    assert config.current() == "mine"
