"""Who holds an application and until when: pure decisions, the clock is an argument (epoch seconds of one process).

A deploy takes three steps: `begin` (may I?), `heartbeat` while it works, and `finish` or `abandon`. Deploys of one
application exclude each other; one that stops giving heartbeats counts as dead. An application goes when its last lease
was released or ran out, or when its first deploy died half-way. One that was ever deployed without a lease is `kept`
until a teardown names no holder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Answer = Literal["deploy", "ready", "wait", "closing"]
"""`deploy`: go ahead. `ready`: the same configuration answered already. `wait`: another deploy is at work.
`closing`: the application is being removed; ask again when that is done."""

HEARTBEAT_S = 5.0
DEPLOYER_TTL_S = 60.0
CLOSING_GRACE_S = 120.0
"""Seconds that a teardown job has for the removal before the keeper does it itself."""


@dataclass
class Ledger:
    """The state of one application that outlives the jobs.

    Attributes:
        app_name: The application.
        created_s: When its first deploy began.
        ready_s: When it answered first, `None` before.
        fingerprint: Configuration that answered last, empty before.
        spec: That configuration, to go back to when an update fails.
        result: What the deploy of it answered.
        leases: Until when each holder's claim is valid.
        ttls: Seconds each holder asked for.
        kept: Stays without a lease.
        kept_before: What `kept` goes back to when the deploy at work fails; `None` while none is.
        deployer: The deploy at work, empty when none is.
        deployer_until_s: When it counts as dead.
        closing_s: When the removal began.
        gpus: GPUs held at the last look.
        gpu_seconds: GPUs held × seconds up to then.
        sampled_s: When that was.
    """

    app_name: str
    created_s: float
    ready_s: float | None = None
    fingerprint: str = ""
    spec: dict[str, Any] | None = None
    result: dict[str, Any] | None = None
    leases: dict[str, float] = field(default_factory=dict)
    ttls: dict[str, float] = field(default_factory=dict)
    kept: bool = False
    deployer: str = ""
    deployer_until_s: float = 0.0
    closing_s: float | None = None
    gpus: float = 0.0
    gpu_seconds: float = 0.0
    sampled_s: float | None = None
    kept_before: bool | None = None

    def begin(self, fingerprint: str, deployer: str, holder: str | None, ttl_s: float, now: float) -> Answer:
        """Ask to deploy a configuration; `holder=None` keeps the application without a lease."""
        if self.closing_s is not None:
            return "closing"
        if self.deployer and self.deployer != deployer and now < self.deployer_until_s:
            return "wait"  # and claims nothing: it may wait in vain
        if holder is not None:
            self.renew(holder, ttl_s, now)
        if self.deployer != deployer:
            self._end_turn(failed=True)  # of a deploy that died in its turn
        if self.kept_before is None:
            self.kept_before = self.kept
        self.kept = self.kept or holder is None
        self.deployer, self.deployer_until_s = deployer, now + DEPLOYER_TTL_S
        return "ready" if fingerprint == self.fingerprint else "deploy"

    def heartbeat(self, deployer: str, holder: str | None, now: float) -> bool:
        """The deploy lives. False when it lost its turn, because the application is being removed."""
        if self.closing_s is not None or self.deployer != deployer:
            return False
        self.deployer_until_s = now + DEPLOYER_TTL_S
        if holder is not None:
            self.renew(holder, self.ttls.get(holder, DEPLOYER_TTL_S), now)
        return True

    def finish(self, deployer: str, fingerprint: str, spec: dict[str, Any], result: dict[str, Any], now: float) -> bool:
        """The deploy's models have answered. False when it lost its turn before."""
        if self.closing_s is not None or self.deployer != deployer:
            return False
        self._end_turn(failed=False)
        self.fingerprint, self.spec, self.result = fingerprint, spec, result
        self.ready_s = now if self.ready_s is None else self.ready_s
        return True

    def abandon(self, deployer: str, holder: str | None, now: float) -> bool:
        """The deploy failed. Its holder claims nothing any more. False when it lost its turn before."""
        if self.closing_s is not None or self.deployer != deployer:
            return False
        self._end_turn(failed=True)
        if holder is not None:
            self.leases.pop(holder, None)
        if self.ready_s is None:
            self.closing_s = now - CLOSING_GRACE_S  # at once: a job that is being stopped may not get to clean up
        return True

    def _end_turn(self, *, failed: bool) -> None:
        if failed and self.kept_before is not None:
            self.kept = self.kept_before
        self.deployer, self.kept_before = "", None

    def renew(self, holder: str, ttl_s: float, now: float) -> bool:
        """Hold on for `ttl_s` from now. False when the application is being removed."""
        if self.closing_s is not None:
            return False
        self.leases[holder] = now + ttl_s
        self.ttls[holder] = ttl_s
        return True

    def release(self, holder: str | None, now: float) -> tuple[str, ...]:
        """Give up one claim, or with `None` all of them.

        Returns:
            Holders that are left. When empty, and the application is not `kept`, its removal has begun.
        """
        if holder is None:
            self.leases.clear()
            self.kept, self.kept_before = False, None
        else:
            self.leases.pop(holder, None)
        left = self.holders(now)
        if not left and not self.is_kept(now) and self.closing_s is None:
            self.closing_s = now
        return left

    def holders(self, now: float) -> tuple[str, ...]:
        """Holders whose claims are valid, first to run out first."""
        return tuple(sorted((h for h, until in self.leases.items() if until > now), key=lambda h: self.leases[h]))

    def overdue(self, now: float) -> bool:
        """Whether the application should go now, though no teardown job is removing it."""
        if self.closing_s is not None:
            return now >= self.closing_s + CLOSING_GRACE_S
        if self.deployer and now < self.deployer_until_s:
            return False
        return self.ready_s is None or not (self.is_kept(now) or self.holders(now))

    def is_kept(self, now: float) -> bool:
        """Whether it stays without a lease. What a deploy asked for that died in its turn does not count."""
        died = self.deployer and now >= self.deployer_until_s
        return self.kept_before if died and self.kept_before is not None else self.kept

    def sample(self, gpus: float, now: float) -> None:
        """Account for the GPUs held since the last look."""
        if self.sampled_s is not None:
            self.gpu_seconds += self.gpus * (now - self.sampled_s)
        self.gpus, self.sampled_s = gpus, now
