"""What peers, network, capacity and plots make of their numbers, and the link and the padding that they stand on."""

from __future__ import annotations

import dataclasses
import math
import socket
import time
from pathlib import Path

import pytest

from bench import plots
from bench.acceptance_by_position import conditional
from bench.ahead import AheadOptions, AheadRow, ahead_goals, ahead_table
from bench.capacity import FARTHEST, PLAIN, TOGETHER, CapacityOptions, Plan, last_above, plan_capacity, verdict
from bench.delayed_link import DelayedLink
from bench.gathering import GatheringCase, GatheringOptions, gathering_table
from bench.network import paying_distances
from bench.overhead import OverheadResult, plain_cost
from bench.padded_target import layers_for
from bench.peers_results import PEER, Decoded, PeersResult, peers_goals, peers_rows
from bench.round_bytes import RoundBytes
from bench.rounds import Forwards, model_milliseconds
from bench.serving_results import Latency, ServingCase, serving_constants
from bench.simulation_check import check, constants_from
from bench.tables import overhead_goals


def decoded(token_ids: tuple[int, ...], seconds: float) -> Decoded:
    """All of them in two responses."""
    return Decoded(token_ids, (seconds / 2, seconds), (1, len(token_ids) - 1))


def turns(peer_ids: tuple[int, ...]) -> list[dict[str, Decoded]]:
    """Two turns on a machine that gets slower by half: the ratios stay."""
    return [
        {
            "Tandem 0": decoded((1, 2, 3, 4), slower * 1.0),
            "Tandem 2": decoded((1, 2, 3, 4), slower * 0.5),
            PEER: decoded(peer_ids, slower * 0.8),
        }
        for slower in (1.0, 2.0)
    ]


def test_a_round_waits_for_the_whole_of_each_forward_that_it_is_in() -> None:
    """Ten rounds, each in five forwards of the draft and one of the target, which it shares with another one."""
    draft = [Forwards(count=15, items=30, seconds=0.03), Forwards(count=10, items=20, seconds=0.02)]
    target = [Forwards(count=5, items=10, seconds=0.05)]
    assert model_milliseconds([draft, target], rounds=10) == pytest.approx(5 * 2 + 1 * 10)
    assert model_milliseconds([[Forwards(0, 0, 0)]], rounds=10) == 0


def test_peers_are_compared_within_a_turn() -> None:
    rows = {row.way: row for row in peers_rows("chat", 0.0, turns((1, 2, 3, 4)))}
    assert rows["Tandem 2"].over_plain == pytest.approx(2.0)
    assert rows["Tandem 2"].over_peer == pytest.approx(1.6)
    assert rows["Tandem 2"].first_token == pytest.approx(375)
    assert rows["Tandem 2"].tokens_per_step == 2.0
    assert all(row.same_output for row in rows.values())
    assert all(goal.reached for goal in peers_goals(PeersResult("a pair", 2, 4, list(rows.values()))))


def test_another_greedy_output_is_told_and_a_drawn_one_is_not_compared() -> None:
    rows = peers_rows("chat", 0.0, turns((1, 2, 9, 4)))
    assert [row.same_output for row in rows] == [True, True, False]
    assert [goal.reached for goal in peers_goals(PeersResult("a pair", 2, 4, rows))] == [True, False]
    assert {row.same_output for row in peers_rows("chat", 1.0, turns((1, 2, 9, 4)))} == {None}


@pytest.mark.parametrize(("slower", "reached"), [(1.01, True), (1.03, False)])
def test_what_drafts_cost_a_plain_round(slower: float, reached: bool) -> None:
    """Runs are compared in pairs: a machine that gets slower by half is no drafts' doing."""
    plain = plain_cost([[slower * 1.0, slower * 2.0, 9.0], [1.0, 2.0, 9.0]], [3.0, 2.0])
    assert (plain.pairs, plain.cpu_ratio) == (3, 1.5)
    assert plain.round_ratio == pytest.approx(slower)
    bytes_per_round = [RoundBytes(512, 1, 2, 3, 4)]
    result = OverheadResult([], plain, bytes_per_round, gamma=5, support_size=64, echo_p50=0.1)
    assert [goal.reached for goal in overhead_goals(result)] == [reached, True]
    assert len(overhead_goals(dataclasses.replace(result, plain=None))) == 1


@pytest.mark.parametrize(
    ("plain", "speculative", "tokens", "expected"),
    [
        # 1.5 tokens in 12 ms beside 10 ms a token: (10 + x) = (12 + 2x) / 1.5 at x = 6.
        (10.0, 12.0, 1.5, (0.0, 6.0)),
        (10.0, 16.0, 1.5, (0.0, 0.0)),
        (10.0, 15.0, 2.0, (0.0, math.inf)),
        (10.0, 25.0, 2.0, (0.0, 0.0)),
        (10.0, 20.0, 3.0, (0.0, math.inf)),
        # (10 + x) = (35 + 2x) / 3 at x = 5.
        (10.0, 35.0, 3.0, (5.0, math.inf)),
    ],
)
def test_a_block_pays_between_distances(
    plain: float, speculative: float, tokens: float, expected: tuple[float, float]
) -> None:
    assert paying_distances(plain, speculative, tokens) == pytest.approx(expected)


def test_conditional_acceptance_multiplies_up_to_what_was_counted() -> None:
    assert conditional((0.8, 0.4, 0.0, 0.0)) == pytest.approx((0.8, 0.5, 0.0, 0.0))


def test_a_padding_makes_up_the_difference() -> None:
    assert layers_for(15.0, draft=2.0, target=10.0, layer=0.5) == 40
    with pytest.raises(ValueError, match=r"5\.0 times"):
        layers_for(4.0, draft=2.0, target=10.0, layer=0.5)


def test_the_last_argument_above() -> None:
    assert last_above(lambda x: 1.0 - x, 0.8) == pytest.approx(0.2, abs=FARTHEST / 500)
    assert last_above(lambda x: 1.0 - x, 2.0) == 0.0
    assert last_above(lambda x: 1.0 - x, 0.1) == math.inf


def plan(layout: str, drafts: float, speedup: float, price: float) -> Plan:
    return Plan(4, layout, drafts, 2, 10.0, speedup, price, 1.0, 0.5, 0.5)


@pytest.mark.parametrize(
    ("together", "apart", "for_the_price", "said"),
    [
        (0.9, 0.95, 0.8, "plain decoding is best"),
        (1.5, 1.4, 1.2, "DON'T PAY"),
        (1.5, 1.8, 1.4, "the money gives less"),
        (1.5, 2.2, 1.8, "Apart pays"),
    ],
)
def test_a_verdict_says_when_separate_services_do_not_pay(
    together: float, apart: float, for_the_price: float, said: str
) -> None:
    plans = [
        plan(PLAIN, 0, 1, 1),
        plan(TOGETHER, 0, together, together),
        plan("1 draft for 1", 1, apart, for_the_price),
    ]
    assert said in verdict(plans)


def test_a_plan_has_every_layout_and_knows_what_it_costs() -> None:
    result = plan_capacity(CapacityOptions(requests=(2,), targets_per_draft=(1, 2), gammas=(3,), draft_price=0.5))
    plain, together, one, half = result.plans
    assert (plain.gamma, plain.speedup, plain.draft_busy) == (0, 1.0, 0.0)
    assert together.speedup_for_the_price == together.speedup > 1
    assert one.speedup / one.speedup_for_the_price == pytest.approx(1.5)
    assert half.speedup / half.speedup_for_the_price == pytest.approx(1.25)
    assert half.draft_busy > one.draft_busy
    [limits] = result.break_even
    assert limits.against_plain > 0


def case(concurrency: int, gamma: int, milliseconds: float) -> ServingCase:
    """One whose tokens take so long each."""
    latency = Latency(milliseconds, milliseconds, milliseconds)
    return ServingCase(concurrency, gamma, 1.0, 1.0, latency, latency, 1.0, 0.5, 1.0 + gamma, (1.0,) * gamma)


def test_the_simulation_is_checked_with_what_was_measured() -> None:
    # A forward of 8 ms + 2 ms a token, 3 ms a draft step, 5 ms for the rest.
    cases = [case(1, 0, 15.0), case(1, 2, 25.0 / 3)]
    constants = serving_constants([(1, 0.003)], [(1, 0.010), (3, 0.014)], cases)
    assert constants is not None
    assert constants.overhead == pytest.approx(0.005)
    assert constants.orchestrator == pytest.approx(0.0005)
    measured = {"serving": {"constants": dataclasses.asdict(constants), "cases": []}}
    for each in cases:
        measured["serving"]["cases"].append(
            {**dataclasses.asdict(each), "decode_tokens_per_second": each.decode_tokens_per_second}
        )
    assert constants_from(measured) == constants
    [checked] = check(measured)
    assert checked.error == pytest.approx(0.0, abs=0.01)
    with pytest.raises(ValueError, match="no constants"):
        constants_from({})


def test_a_link_delays_both_ways_and_keeps_bytes_under_way() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        DelayedLink(f"127.0.0.1:{server.getsockname()[1]}", 0.2) as link,
    ):
        host, port = link.address.split(":")
        with socket.create_connection((host, int(port)), timeout=30) as client:
            began = time.monotonic()
            client.sendall(b"a")
            far, _ = server.accept()
            with far:
                far.settimeout(30)
                assert far.recv(1) == b"a"
                assert time.monotonic() - began >= 0.1
                began = time.monotonic()
                for _ in range(10):  # one after the other they would take 1 s and arrive as many pieces
                    far.sendall(b"bc")
                received = b""
                while len(received) < 20:
                    received += client.recv(100)
                assert received == b"bc" * 10
                assert time.monotonic() - began >= 0.1
                client.shutdown(socket.SHUT_WR)
                assert far.recv(1) == b""


def test_a_link_is_as_wide_as_it_is_told() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        DelayedLink(f"127.0.0.1:{server.getsockname()[1]}", bytes_per_second=100_000) as link,
    ):
        host, port = link.address.split(":")
        with socket.create_connection((host, int(port)), timeout=30) as client:
            began = time.monotonic()
            client.sendall(bytes(20_000))
            far, _ = server.accept()
            with far:
                far.settimeout(30)
                count = 0
                while count < 20_000:
                    count += len(far.recv(1 << 16))
                assert time.monotonic() - began >= 0.2


def test_every_picture_is_drawn_from_its_numbers(tmp_path: Path) -> None:
    latency = {"p50": 1.0, "p95": 2.0, "p99": 3.0}
    row = {"prompts": "chat", "temperature": 0.0, "gamma": 2, "speedup": 1.2, "predicted_speedup": 1.1}
    row |= {"of_prediction": 1.1, "acceptance_per_position": [0.8, 0.5]}
    results = {
        "pair": {"models": "a pair", "rows": [row, {**row, "gamma": 3, "speedup": None, "of_prediction": None}]},
        "simulate": {"checked": [{"source": "serving", "error": -0.1, "measured": 11.0}]},
        "serving": {
            "models": "a pair",
            "cases": [{"gamma": 0, "concurrency": 1, "per_output_token": latency, "tokens_per_second": 5.0}],
        },
        "peers": {
            "models": "a pair",
            "rows": [
                {"prompts": "chat", "temperature": 0.0, "way": way, "over_peer": 1.3} for way in ("Tandem 2", PEER)
            ],
        },
        "network": {
            "models": "a pair",
            "case": "chat",
            "rows": [{"gamma": gamma, "round_trip": 1.0, "speedup": 1.0} for gamma in (0, 2)],
        },
    }
    drawn = list(plots.draw(results, tmp_path))
    assert [path.stem for path in drawn] == list(plots.PICTURES)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert [path.stem for path in plots.draw({"network": results["network"]}, tmp_path)] == ["speedup-over-distance"]


def test_gathering_is_judged_by_neighbouring_runs() -> None:
    """A machine that gets slower changes no ratio."""
    case = GatheringCase(2, 0, rates=(30.0, 20.0), batch_sizes=(2.0, 1.0), ratios=(1.4, 1.5, 9.0))
    assert case.gain == 1.5
    row = [next(iter(column.cells)) for column in gathering_table([case], GatheringOptions()).columns]
    assert row == ["2", "0", "30.0", "20.0", "2.0", "1.0", "1.50x", "1.45 to 5.25"]


def test_drafting_ahead_is_judged_by_the_gamma_that_is_best_with_it() -> None:
    def row(prompts: str, gamma: int, ahead: float, gain: float) -> AheadRow:
        return AheadRow(prompts, 1.0, gamma, 40.0, 3.0, ahead / gain, ahead, gain, (2, 5, 3), same_tokens=True)

    rows = [row("chat", 4, 2.0, 1.5), row("chat", 8, 2.6, 1.2), row("prose", 4, 2.2, 1.5), row("prose", 8, 2.8, 1.3)]
    plain, waiting = ahead_goals(rows)
    assert (plain.name, plain.value, plain.reached) == ("ahead, gamma 8, over plain decoding", "2.70x", True)
    assert (waiting.value, waiting.reached) == ("1.25x", True)
    assert rows[0].ready == 0.7
    cells = [next(iter(column.cells)) for column in ahead_table(rows, AheadOptions()).columns]
    assert cells == ["chat", "1", "4", "40.0", "3.00", "1.33x", "2.00x", "1.50x", "70%", "2/5/3", "same"]
