"""How prompts share the tokens of a step."""

from hypothesis import given
from hypothesis import strategies as st

from services.executor.prefill import CHANGE, FILL, KNOWN_S, UNSEEN, PrefillShares, Prompt, PromptPace, count_waiting


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
    pace = PromptPace()
    expected = [512, 32, 32, 64, 240, 0]
    assert [pace.beside(rows, 512) for rows in (0, 1, 16, 32, 120, 512)] == expected
    # Dear prompts take no less.
    pace.note(decoding=32, prompt_tokens=0, took_s=0.1)
    for _ in range(20):
        pace.note(decoding=32, prompt_tokens=pace.beside(1, 512), took_s=5.0)
    assert [pace.beside(rows, 512) for rows in (0, 1, 16, 32, 120, 512)] == expected


@given(st.floats(0.00001, 0.01), st.floats(0.0, 0.03), st.integers(1, 64))
def test_prompts_come_to_make_a_step_twice_as_long_and_no_longer(token_s: float, fixed_s: float, rows: int) -> None:
    """Whatever a token of a prompt takes, and a step that has prompts at all."""
    pace, limit = PromptPace(), 512
    least = pace.beside(rows, limit)
    for _ in range(60):
        pace.note(decoding=rows, prompt_tokens=0, took_s=0.04)
        tokens = pace.beside(rows, limit)
        pace.note(decoding=rows, prompt_tokens=tokens, took_s=0.04 + fixed_s + tokens * token_s)
    tokens = pace.beside(rows, limit)
    assert least <= tokens <= limit - rows
    if tokens > least:
        assert fixed_s + tokens * token_s <= 0.04 * 1.02
    if tokens < limit - rows:
        assert fixed_s + (tokens + 2) * token_s >= 0.04 * 0.98


def test_prompts_that_were_short_do_not_say_that_others_must_be() -> None:
    pace = PromptPace()
    pace.note(decoding=8, prompt_tokens=0, took_s=0.04)
    for _ in range(10):
        pace.note(decoding=8, prompt_tokens=pace.beside(8, 512), took_s=0.05)
    known = pace.beside(8, 512)
    assert known > 100
    pace.note(decoding=8, prompt_tokens=3, took_s=0.06)
    assert pace.beside(8, 512) == known
    # One step that something else held up costs one change.
    pace.note(decoding=8, prompt_tokens=known, took_s=9.0)
    assert abs(pace.beside(8, 512) - known / CHANGE) <= 1


def learned(rows: int, token_s: float = 0.0001) -> PromptPace:
    """A pace that knows what prompts take beside so many rows, of which a step takes 40 ms."""
    pace = PromptPace()
    for _ in range(60):
        pace.note(decoding=rows, prompt_tokens=0, took_s=0.04)
        tokens = pace.beside(rows, 4096)
        pace.note(decoding=rows, prompt_tokens=tokens, took_s=0.04 + tokens * token_s)
    return pace


@given(st.integers(1, 64), st.integers(0, 200))
def test_readers_lose_a_step_of_their_own_or_one_of_all_who_wait(rows: int, waiting: int) -> None:
    pace = learned(rows)
    tokens = pace.beside(rows, 4096, waiting=waiting)
    assert tokens >= pace.beside(rows, 4096)
    if tokens < 4096 - rows:
        assert rows * tokens * 0.0001 <= max(rows, waiting) * 0.04 * 1.03
        # What such a step takes changes nothing about what the next may take: it is as dear as it was.
        pace.beside(rows, 4096, waiting=waiting)
        pace.note(decoding=rows, prompt_tokens=tokens, took_s=0.04 + tokens * 0.0001)
        assert abs(pace.beside(rows, 4096) - learned(rows).beside(rows, 4096)) <= 0.05 * tokens


def test_who_waited_before_a_step_without_readers_counts_no_more() -> None:
    stretched, other = learned(8), learned(8)
    stretched.beside(8, 4096, waiting=80)
    for pace in (stretched, other):
        pace.beside(0, 4096, waiting=80)
        # Rows that were to compute the last token of a prompt generate by now.
        pace.note(decoding=8, prompt_tokens=400, took_s=0.12)
    assert stretched.beside(8, 4096) == other.beside(8, 4096)


@given(st.integers(1, 64), st.integers(0, 500), st.floats(0.0, 0.03))
def test_whoever_waits_what_prompts_get_in_any_case_stays_as_it_is(rows: int, waiting: int, token_s: float) -> None:
    """Where prompts are dear that is longer than a step should be, and must not be that for each who waits."""
    pace, limit = learned(rows, token_s), 4096
    least = PromptPace().beside(rows, limit)
    tokens = pace.beside(rows, limit, waiting=waiting)
    assert tokens >= least
    if tokens > least:
        assert rows * tokens * token_s <= max(rows, waiting) * 0.04 * 1.03
    assert PromptPace().beside(rows, limit, waiting=waiting) == least


@given(
    st.lists(st.sampled_from("abcd"), max_size=20), st.lists(st.sampled_from("abcd"), max_size=20), st.integers(1, 50)
)
def test_a_tenants_prompts_count_for_one_where_there_are_others(
    asking: list[str], generating: list[str], more: int
) -> None:
    before = count_waiting(asking, [*generating, "x"])
    assert before == len(set(asking))
    assert count_waiting([*asking, *["e"] * more], [*generating, "x"]) == before + 1
    assert count_waiting(["a"] * more, []) == count_waiting(["a"] * more, ["a"]) == more


def test_what_a_step_takes_is_known_for_about_so_many_rows() -> None:
    pace = PromptPace()
    pace.note(decoding=2, prompt_tokens=0, took_s=9.0)  # the very first step, which something held up
    for _ in range(20):
        pace.note(decoding=32, prompt_tokens=0, took_s=0.04)
        pace.note(decoding=2, prompt_tokens=0, took_s=0.01)
    for _ in range(60):
        tokens = pace.beside(2, 4096)
        pace.note(decoding=2, prompt_tokens=tokens, took_s=0.01 + tokens * 0.00001)
    # A held-up step is forgotten: twice 10 ms, or the little more that it still counts for.
    assert 990 <= pace.beside(2, 4096) <= 0.01 / 0.00001 * 10


@given(st.sampled_from([(), (1,), (1, 8, 60)]), st.integers(1, 60))
def test_prompts_that_never_end_do_not_stay_at_the_least(known: tuple[int, ...], rows: int) -> None:
    """Beside a number of rows that never had a step without prompts, known of others or of none."""
    pace, token_s, limit = PromptPace(), 0.0001, 4096

    def plain_s(rows: int) -> float:
        return 0.01 + 0.001 * rows

    for other in known:
        if other.bit_length() != rows.bit_length():
            pace.note(decoding=other, prompt_tokens=0, took_s=plain_s(other))
    given = []
    for _ in range(400):
        given.append(pace.beside(rows, limit))
        pace.note(decoding=rows, prompt_tokens=given[-1], took_s=plain_s(rows) + given[-1] * token_s)
    least, fair = PromptPace().beside(rows, limit), plain_s(rows) / token_s
    some = [tokens for tokens in given[200:] if tokens]
    assert all(max(least, fair * 0.98) - 1 <= tokens <= max(least, fair * 1.02) for tokens in some)
    assert len(some) >= 200 - 200 // UNSEEN - 1
    # As soon as steps without prompts come by themselves, none is made.
    for _ in range(3 * UNSEEN):
        pace.note(decoding=rows, prompt_tokens=0, took_s=plain_s(rows))
        tokens = pace.beside(rows, limit)
        assert tokens >= least
        pace.note(decoding=rows, prompt_tokens=tokens, took_s=plain_s(rows) + tokens * token_s)


@given(st.lists(st.tuples(st.integers(0, 64), st.integers(0, 512), st.floats(0, 10)), max_size=40), st.integers(0, 600))
def test_whatever_steps_took_prompts_have_their_part_and_fit(steps: list[tuple[int, int, float]], rows: int) -> None:
    pace = PromptPace()
    for decoding, tokens, took_s in steps:
        pace.note(decoding=decoding, prompt_tokens=tokens, took_s=took_s)
    assert PromptPace().beside(rows, 600) <= pace.beside(rows, 600) <= 600 - rows


def test_who_had_far_more_than_its_part_fills_half_a_step_while_others_are_at_work() -> None:
    shares, greedy = PrefillShares(), Prompt("greedy", 16_000)
    shares.divide([Prompt("other", 40)], 512, now=0.0)
    assert [shares.divide([greedy], 512, now=0.1) for _ in range(4)] == [[512], [256], [256], [256]]
    assert shares.divide([greedy, Prompt("other", 300)], 512, now=0.3) == [16, 300]
    assert shares.divide([greedy, Prompt("other", 100)], 512, now=0.4) == [156, 100]
    # Alone again, it takes all.
    assert shares.divide([greedy], 512, now=1.0 + KNOWN_S) == [512]


def test_a_crowd_that_asks_for_one_prompt_each_fills_its_steps() -> None:
    shares = PrefillShares()
    for number in range(50):
        shares.divide([Prompt(f"one of {number}", 64)], 512, now=float(number))
    crowd = [Prompt(f"another of {number}", 64) for number in range(20)]
    assert sum(shares.divide(crowd, 160, now=50.0)) == 160
    assert shares.divide([Prompt("last", 300)], 160, now=50.1) == [160]


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
