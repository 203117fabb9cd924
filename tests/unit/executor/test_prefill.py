"""How prompts share the tokens of a step."""

from hypothesis import given
from hypothesis import strategies as st

from services.executor.prefill import FILL, KNOWN_S, PrefillShares, Prompt, beside


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 1000)), max_size=8),
    st.integers(0, 512),
    st.integers(1, 5),
)
def test_tokens_go_unused_only_where_a_greedy_tenant_could_use_them_and_everybody_advances(
    rows: list[tuple[str, int]], budget: int, times: int
) -> None:
    shares = PrefillShares()
    prompts = [Prompt(tenant, left) for tenant, left in rows]
    for now in range(times):
        got = shares.divide(prompts, budget, now=float(now))
        wanted = sum(prompt.left for prompt in prompts)
        assert min(budget // FILL, wanted) <= sum(got) <= min(budget, wanted)
        if len({prompt.tenant for prompt in prompts}) == 1:
            assert sum(got) == min(budget, wanted)
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
    assert [beside(rows, 512) for rows in (0, 1, 16, 32, 120, 512)] == [512, 32, 32, 64, 240, 0]


def test_who_had_far_more_than_its_part_fills_half_a_step_while_others_are_at_work() -> None:
    shares, greedy = PrefillShares(), Prompt("greedy", 16_000)
    shares.divide([Prompt("other", 40)], 512, now=0.0)
    assert [shares.divide([greedy], 512, now=0.1) for _ in range(4)] == [[512], [256], [256], [256]]
    assert shares.divide([greedy, Prompt("other", 300)], 512, now=0.3) == [16, 300]
    assert shares.divide([greedy, Prompt("other", 100)], 512, now=0.4) == [156, 100]
    # Alone again, it takes all.
    assert shares.divide([greedy], 512, now=1.0 + KNOWN_S) == [512]


def test_who_comes_back_brings_no_credit() -> None:
    """Else whoever was idle and then asks for much would go before all who were at work."""
    shares = PrefillShares()
    for now in (0.0, 0.5, 1.0):
        shares.divide([Prompt("busy", 400), Prompt("busier", 400)], 800, now=now)
    crowd = [Prompt("back", 300)] * 10
    first = shares.divide([*crowd, Prompt("busy", 200), Prompt("busier", 200)], 512, now=1.2)
    assert first[-2:] == [200, 200]


def test_who_comes_back_counts_as_those_at_work_on_average() -> None:
    shares = PrefillShares()
    shares.divide([Prompt("busy", 300), Prompt("busier", 900)], 1200, now=0.0)
    # 300, 900, and so 600: the first of the crowd goes before the busier one, the others do not.
    crowd = [Prompt("back", 300)] * 4
    got = shares.divide([*crowd, Prompt("busier", 200), Prompt("busy", 200)], 1000, now=0.0)
    assert (got[0], got[4], got[5]) == (300, 200, 200)


def test_what_was_long_ago_counts_little() -> None:
    shares = PrefillShares()
    shares.divide([Prompt("a", 400)], 400, now=0.0)
    shares.divide([Prompt("b", 100)], 100, now=60.0)
    assert shares.divide([Prompt("a", 400), Prompt("b", 400)], 400, now=60.0) == [388, 12]
