"""Names are matched as PEFT matches them: its own functions are the judge."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraport.bundle.patterns import Targets, resolve_pattern, suffixes
from loraport.bundle.peft_config import PeftConfig

tuners_utils = pytest.importorskip("peft.tuners.tuners_utils")
get_pattern_key = pytest.importorskip("peft.utils.other").get_pattern_key

FAST = settings(max_examples=400)
words = st.sampled_from(
    ["model", "layers", "blocks", "self_attn", "q_proj", "proj", "mlp", "a", "0", "1", "12", "lm_head"]
)
paths = st.lists(words, min_size=1, max_size=6).map(".".join)
literal_names = st.lists(words, min_size=1, max_size=3).map(".".join)


def a_config(**changes: Any) -> PeftConfig:
    return PeftConfig(**{"rank": 8, "alpha": 16, "rank_pattern": {}, "alpha_pattern": {}, **changes})


@FAST
@given(
    paths,
    st.lists(literal_names, max_size=4),
    st.lists(literal_names, max_size=2),
    st.none() | st.frozensets(st.sampled_from([0, 1, 12]), min_size=1),
    st.lists(st.sampled_from(["layers", "blocks", "model.layers", "a"]), max_size=2),
)
def test_targets(
    path: str, target: list[str], exclude: list[str], layers: frozenset[int] | None, pattern: list[str]
) -> None:
    pattern = pattern if layers is not None else []
    ours = Targets(
        a_config(
            target_modules=tuple(target),
            exclude_modules=tuple(exclude),
            layers_to_transform=layers,
            layers_pattern=tuple(pattern),
        )
    )
    theirs = SimpleNamespace(
        target_modules=set(target),
        exclude_modules=set(exclude),
        layers_to_transform=None if layers is None else sorted(layers),
        layers_pattern=pattern,
        modules_to_save=None,
        target_parameters=None,
    )
    found = tuners_utils.check_target_module_exists(theirs, path)
    expected = bool(found) and not isinstance(found, tuners_utils._ExcludedModule)
    assert ours.matches(path) == expected


@FAST
@given(paths, st.dictionaries(literal_names, st.integers(1, 64), max_size=5))
def test_patterns(path: str, pattern: dict[str, int]) -> None:
    found = resolve_pattern(pattern, path, 8)
    theirs = {
        # PEFT takes the first that matches, so every order of the file is tried.
        pattern.get(get_pattern_key([key, *pattern], path), 8)
        for key in [*pattern, "no_such_name"]
    }
    if found is not None:
        assert theirs == {found}
    else:
        assert len(theirs) > 1


@FAST
@given(paths)
def test_suffixes_are_ends_after_a_dot(path: str) -> None:
    ends = suffixes(path)
    assert ends[0] == path
    assert all(path.endswith("." + end) for end in ends[1:])
    assert len(ends) == path.count(".") + 1
