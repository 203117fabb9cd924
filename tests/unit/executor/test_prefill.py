"""How prompts share the tokens of a step."""

from hypothesis import given
from hypothesis import strategies as st

from services.executor.prefill import PrefillShares, Prompt, beside


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 1000)), max_size=8),
    st.integers(0, 512),
    st.integers(1, 5),
)
def test_nothing_is_lost_and_everybody_advances(rows: list[tuple[str, int]], budget: int, times: int) -> None:
    shares = PrefillShares()
    prompts = [Prompt(tenant, left) for tenant, left in rows]
    for now in range(times):
        got = shares.divide(prompts, budget, now=float(now))
        assert sum(got) == min(budget, sum(prompt.left for prompt in prompts))
        assert all(0 <= share <= prompt.left for share, prompt in zip(got, prompts, strict=True))
        if budget >= len(prompts):
            assert all(got)


def test_neither_one_long_prompt_nor_many_short_ones_hold_up_another_tenant() -> None:
    for crowd in ([Prompt("crowd", 16_000)], [Prompt("crowd", 64)] * 6):
        shares = PrefillShares()
        for now in range(3):
            shares.divide(crowd, 400, now=float(now))
        assert shares.divide([*crowd, Prompt("other", 300)], 400, now=3.0)[-1] == 300


def test_prompts_take_a_part_of_a_step_in_which_rows_generate() -> None:
    assert [beside(rows, 512) for rows in (0, 1, 16, 32, 120, 512)] == [512, 64, 64, 128, 392, 0]


def test_what_was_long_ago_counts_little() -> None:
    shares = PrefillShares()
    shares.divide([Prompt("a", 400)], 400, now=0.0)
    shares.divide([Prompt("b", 100)], 100, now=60.0)
    assert shares.divide([Prompt("a", 400), Prompt("b", 400)], 400, now=60.0) == [388, 12]
