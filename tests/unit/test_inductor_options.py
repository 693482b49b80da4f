"""Names that torch.compile takes for Inductor: all are accepted, some are settings, and the others say once that they change nothing."""

import json
import warnings

import pytest
import torch
from torch._inductor import list_mode_options, list_options  # a peer: only to know its names

import opforge
from opforge.errors import ConfigError, OpforgeWarning
from opforge.generated.options import OPTIONS
from opforge.runtime import config, inductor_options


@pytest.fixture(autouse=True)
def unwarned(monkeypatch):
    monkeypatch.setattr(inductor_options, "_warned", set())


def of(**options):
    """The configuration, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return config.from_options({name.replace("__", "."): value for name, value in options.items()})


def test_every_option_and_mode_of_this_torch_is_accepted():
    defaults = torch._inductor.config.get_config_copy()
    names = list_options()
    assert len(names) > 500
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OpforgeWarning)
            config.from_options({name: defaults[name]})
    assert list_mode_options().keys() <= config.MODES.keys()
    for name, options in list_mode_options().items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OpforgeWarning)
            config.from_options(mode=name)
            config.from_options(options)


def test_every_name_warns_or_is_a_setting_or_holds():
    unlike = object()  # no option's value
    for option in OPTIONS:
        for name in option.names:
            if option.setting and not option.values:
                continue
            with pytest.warns(OpforgeWarning, match=f"Inductor's option {name!r} = "):
                assert inductor_options.settings_of(name, unlike) == {}
        for text in option.holds:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert inductor_options.settings_of(option.names[0], json.loads(text)) == {}


@pytest.mark.parametrize(
    ("option", "value", "setting", "expected"),
    [
        ("triton.cudagraphs", True, "cudagraphs", True),
        ("triton.cudagraph_trees", False, "cudagraphs_share_memory", False),
        ("triton.cudagraph_or_error", True, "strict", True),
        ("max-autotune", True, "max_autotune", True),
        ("max_autotune_gemm", True, "max_autotune", True),
        ("coordinate_descent_tuning", True, "max_autotune", True),
        ("fallback_random", True, "random", "eager"),
        ("assert_indirect_indexing", False, "index_checks", False),
        ("pattern_matcher", False, "rewrites", False),
        ("force_disable_caches", True, "cache", False),
        ("fx_graph_cache", False, "cache", False),
        ("compile_threads", 3, "build_jobs", 3),
        ("cpp.cxx", "clang++", "cxx", "clang++"),
        ("cpp.cxx", (None, "g++-12"), "cxx", "g++-12"),
        ("cpp.simdlen", 256, "target", "avx2"),
        ("cpp.simdlen", 1, "target", "scalar"),
        ("cpp.vec_isa_ok", False, "target", "scalar"),
        ("debug", True, "debug_verify", True),
        ("trace.enabled", True, "debug_folders", True),
        ("trace.debug_dir", "/tmp/here", "dump_dir", "/tmp/here"),
        ("save_args", True, "debug_save_inputs", True),
        ("verbose_progress", True, "progress", "on"),
        ("disable_progress", True, "progress", "off"),
    ],
)
def test_options_with_a_meaning_are_settings(option, value, setting, expected):
    assert getattr(of(**{option: value}), setting) == expected


def test_what_holds_anyway_changes_and_says_nothing():
    with config.patch(cache=False, strict=True, max_autotune=True):
        assert (
            of(force_disable_caches=False, triton__cudagraph_or_error=False, max_autotune_gemm=False)
            == config.current()
        )
    assert of(epilogue_fusion=True, keep_output_stride=False, cpp__simdlen=None, cpp__threads=-1) == config.current()


def test_a_warning_says_what_is_done_instead_once():
    options = {"emulate_precision_casts": True, "shape_padding": False}
    with pytest.warns(OpforgeWarning) as seen:
        first = config.from_options(options)
    assert first == config.current() == of(**options)
    texts = sorted(str(w.message) for w in seen)
    assert len(texts) == 2
    assert "option 'emulate_precision_casts' = True changes nothing here: " in texts[0]
    assert "results in half precision may differ" in texts[0]
    assert "option 'shape_padding' = False changes nothing here: " in texts[1]


def test_a_value_that_is_not_understood_warns():
    with pytest.warns(OpforgeWarning, match=r"'cpp.simdlen' = 100 is not understood \(values are 0, 1, 256, 512, null"):
        assert config.from_options({"cpp.simdlen": 100}).target == "auto"


def test_the_mode_without_a_meaning_warns_once():
    with pytest.warns(OpforgeWarning, match="mode 'lite' changes nothing here") as seen:
        config.from_options(mode="lite")
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config.from_options(mode="lite")


def test_our_own_name_wins():
    assert of(strict=False, triton__cudagraph_or_error=True).strict is False
    assert of(triton__cudagraph_or_error=True, strict=False).strict is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"triton.cudagraph": True}, "unknown setting 'triton.cudagraph'; did you mean 'triton.cudagraphs'?"),
        ({"epilog_fusion": True}, "unknown setting 'epilog_fusion'; did you mean 'epilogue_fusion'?"),
        ({"max_autotun": True}, "unknown setting 'max_autotun'; did you mean 'max_autotune'?"),
        (
            {"triton.cudagraphs": "maybe"},
            "'triton.cudagraphs' of Inductor: setting 'cudagraphs' is 'maybe'; expected a bool",
        ),
    ],
)
def test_wrong_names_and_values(options, message):
    with pytest.raises(ConfigError) as caught:
        config.from_options(options)
    assert message in str(caught.value)


def test_settings_do_not_have_their_names():
    with pytest.raises(ConfigError, match=r"unknown setting 'triton\.cudagraphs'"):
        config.configure({"triton.cudagraphs": True})


def test_through_torch_compile():
    torch.compiler.reset()
    opforge.reset_stats()
    x = torch.arange(6.0)
    options = {"shape_padding": True, "pattern_matcher": False, "guard_filter_fn": lambda guards: [True] * len(guards)}
    compiled = torch.compile(lambda x: x.sin() + 1, backend="opforge", options=options)
    with pytest.warns(OpforgeWarning, match="option 'shape_padding' = True changes nothing here"):
        result = compiled(x)
    torch.testing.assert_close(result, x.sin() + 1)
    assert opforge.stats()["graphs"] == 1
