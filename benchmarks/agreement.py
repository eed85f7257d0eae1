"""What each process sends and receives until all agree what to restore and from where."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.planning import summaries
from benchmarks.results import Case, Pair, Result, Settings, compared
from mtcheckpoint._choice import VolumeSummary, choose
from mtcheckpoint._coordination import _encode

__all__ = ["CASES", "TOPICS"]

_CLUSTERS = (16, 256, 4096)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Round:
    """One round of agreement: what the processes say, and what process 0 answers to all."""

    topic: str
    values: Sequence[Any]
    verdict: Any

    @property
    def sent_bytes(self) -> int:
        """By the process that says most."""
        return max(len(_encode(value)) for value in self.values)

    @property
    def verdict_bytes(self) -> int:
        return len(_encode({"value": self.verdict}))

    @property
    def collected_bytes(self) -> int:
        return sum(len(_encode(value)) for value in self.values)


def _rounds(nodes: int) -> list[_Round]:
    """A restore on another mesh, out of the memory of all nodes."""
    told = [summary.to_json() for summary in summaries(nodes)]
    choice = choose([VolumeSummary.from_json(value) for value in told], nodes=nodes, replicas=None)
    inventory = _Round(
        topic="restore/inventory",
        values=[[1_800_000_000.123456, summary, [None, [], []]] for summary in told],
        verdict=[choice.to_json(), {}, {"names": ["2026-01-01_00-00"]}],
    )

    def said(topic: str, value: Any) -> _Round:
        return _Round(topic=topic, values=[value], verdict=[value] * nodes)

    servers = [
        [f"http://10.0.{rank // 256}.{rank % 256}:{30000 + rank}", [str(rank), str(rank // 2)]]
        for rank in range(nodes)
    ]
    save_ids = [f"{1010:032x}"]
    opened: list[Any] = [[None, "", "", [], [save_ids, None]] for _ in range(nodes)]
    opened[0] = [None, "", "", [], [save_ids, "t" * 43]]  # the token
    return [
        said("preflight", None),
        inventory,
        _Round(topic="restore/open", values=opened, verdict=opened),
        said("restore/plan", [None, "", "", [], ""]),
        _Round(topic="restore/servers", values=servers, verdict=servers),
        said("restore/plan with others", [None, "", "", [], None]),
        said("restore/read", ["", False, False, [], ["peer", [], False]]),
    ]


TOPICS = frozenset(
    round_.topic for round_ in _rounds(2)
)  # of a restore from peers, whatever the number of nodes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes of one restore.

    Attributes:
        nodes: of the cluster.
        sent: by each process.
        received: by each process.
        collected: by process 0, on top.
        everything: what each would receive if all told all, instead of one process answering.
    """

    nodes: int
    sent: int
    received: int
    collected: int
    everything: int


def traffic(nodes: int) -> Traffic:
    """What the processes of a cluster send and receive."""
    rounds = _rounds(nodes)
    inventory = next(r for r in rounds if r.topic == "restore/inventory")
    received = sum(r.verdict_bytes for r in rounds)
    return Traffic(
        nodes=nodes,
        sent=sum(r.sent_bytes for r in rounds),
        received=received,
        collected=sum(r.collected_bytes * (nodes if len(r.values) == 1 else 1) for r in rounds),
        everything=received - inventory.verdict_bytes + inventory.collected_bytes,
    )


def agreement_bytes(settings: Settings) -> Result:
    """Bytes that agreement on a restore takes, at 16, 256 and 4,096 nodes."""
    counted = [traffic(nodes) for nodes in _CLUSTERS]
    lines = [
        f"{t.nodes} nodes: each sends {t.sent} B and receives {t.received} B,"
        f" process 0 collects {t.collected} B"
        for t in counted
    ]
    last = counted[-1]
    return compared(
        "agreement_bytes",
        [Pair(last.sent + last.received, last.sent + last.everything)],
        f"{'; '.join(lines)}. ours, other: of one process at {last.nodes} nodes, as it is and if"
        " every process got every inventory",
        unit="B",
    )


CASES: dict[str, Case] = {"agreement_bytes": agreement_bytes}
