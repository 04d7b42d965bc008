"""The phases of one save or load: all ranks take part in each, and an error of any rank reaches all of them.

In each phase ranks exchange their results, or the errors that they raised. Each wait has a deadline; where a rank is
late, stopped or dead, all other ranks raise the same error (``ranks.watch``).
"""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar, cast

import torch.distributed as dist

from torchtitan_ext import clock
from torchtitan_ext.checkpoint.operation.arguments import PlaceOfRank, place_problems
from torchtitan_ext.checkpoint.operation.printed_once import leave_report_to_rank_0
from torchtitan_ext.errors import (
    CheckpointFailedError,
    DifferentCallsError,
    LostRankError,
    StateRefusedError,
    TorchtitanExtError,
    WrongArgumentError,
    is_of_storage,
    readable_error,
    refusal,
)
from torchtitan_ext.metrics import log_metrics, timed
from torchtitan_ext.ranks.exchange import REFUSED, Opening, TimedExchange
from torchtitan_ext.ranks.groups import position_in
from torchtitan_ext.ranks.side_group import (
    GroupOffer,
    can_have_side_group,
    known_to_all,
    make_side_group,
    offer_of,
    side_group_of,
)
from torchtitan_ext.ranks.turns import Turn
from torchtitan_ext.ranks.watch import Watch

T = TypeVar("T")
R = TypeVar("R")

TIMEOUT_SECONDS = 300.0
"""How long a rank waits for the others in one phase, its own part done."""


class PhaseFailure(Exception):
    """The errors of ranks, by rank; the end of the phase turns them into one of our errors.

    Attributes:
        of_storage: The ranks on which storage failed.
        is_echo: They follow from the error of another rank, which is told in their place.
        advice: What to do beside, where the group was lost with them.
    """

    def __init__(
        self,
        errors: dict[int, BaseException],
        of_storage: frozenset[int] = frozenset(),
        *,
        is_echo: bool = False,
        advice: str = "",
    ) -> None:
        super().__init__(errors, of_storage)
        self.errors = errors
        self.of_storage = of_storage
        self.is_echo = is_echo
        self.advice = advice


class Phases:
    """Runs the phases of one operation over a process group, and keeps how long each took on this rank.

    Made when earlier operations on the group have ended, and used in a ``with``. ``on_all``, ``through_coordinator``
    and ``to_coordinator`` run a phase and are collective. They raise on all ranks what a rank raised: our own error
    where it is one and nothing is undefined by then, else a ``CheckpointFailedError`` with the errors of all ranks that
    failed; and a ``LostRankError`` where a rank does not come within ``timeout_seconds``, or its connection breaks. A
    rank that was interrupted (``KeyboardInterrupt``, ``SystemExit``) raises that itself.

    Operation (``"save"`` or ``"load"``) and path are for messages. Each phase tells the other ranks the call that it is
    a phase of, as ``call_text`` writes it: where ranks make different calls, all raise one ``DifferentCallsError``.
    """

    def __init__(
        self,
        operation: str,
        process_group: dist.ProcessGroup | None = None,
        *,
        no_dist: bool = False,
        path: object = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        call: str = "",
    ) -> None:
        self._operation = operation
        self._call = call or operation
        self._path = "" if path is None else str(path)
        is_alone = no_dist or (process_group is None and not (dist.is_available() and dist.is_initialized()))
        group = None if is_alone else process_group or dist.group.WORLD
        self.group = group
        """The ranks that take part; ``None`` where this process works alone."""
        self.rank = 0 if group is None else position_in(group)
        """This rank, counted in the group."""
        self.is_coordinator = self.rank == 0
        """Whether this rank is the one that works for all ranks."""
        self.size = 1 if group is None else group.size()
        """Number of ranks that take part."""
        self.timeout_seconds = timeout_seconds
        """How long a rank waits for the others in each phase."""
        self.seconds: dict[str, float] = {}
        """How long each phase took on this rank."""
        self.num_retries = 0
        """How often the operation began anew."""
        self._current: tuple[str, float] = "", 0.0
        self._changed: tuple[str, ...] = ()
        self._changing = self._doing = ""
        self.is_beside = False
        """Whether the exchanges go beside the group, which other threads use meanwhile."""
        self._ranks: tuple[Watch, TimedExchange] | None = None
        self._turn: Turn | None = None
        self._is_told = False
        if group is not None:
            self._turn = Turn(group)
            try:
                watch = Watch(operation, group, path=self._path, timeout_seconds=timeout_seconds)
                self._ranks = watch, TimedExchange(group, watch)
                self._turn.check = watch.check
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Phases:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Ends the watch over the ranks, and lets the next operation on the group begin. Not collective.

        Args:
            error: What ends the operation on this rank. The others are told of an interrupt between two phases.
        """
        try:
            if self._ranks is not None:
                if error is not None and not isinstance(error, Exception) and not self._is_told:
                    self._ranks[0].leave(error)
                self._ranks[0].close()
        finally:
            if self._turn is not None:
                self._turn.end()

    def offer_side_group(self) -> GroupOffer | None:
        """This rank's part of the agreement that ``use_side_group`` needs. Not collective."""
        if self.group is None or self.size == 1 or not can_have_side_group():
            return None
        return offer_of(self.group)

    def use_side_group(self, offers: Sequence[GroupOffer | None]) -> None:
        """Moves the exchanges of the ranks to connections beside the group, given all ranks' offers. Collective."""
        given = [offer for offer in offers if offer is not None]
        if self.group is None or self._ranks is None or len(given) < len(offers):
            return
        watch, group = self._ranks[0], self.group
        if known_to_all(given) is None:
            name = given[0].new
            # Half of the time: the other half is for telling ranks that wait for one which cannot connect.
            connect = partial(make_side_group, group, name, timeout_seconds=self.timeout_seconds / 2)
            self.on_all("connect", connect, doing="ranks were connected for a save beside training")
        self._ranks = watch, TimedExchange(group, watch, side_group_of(group))
        self.is_beside = True

    def at(self, key: str) -> None:
        """Notes the key that this rank works on, for messages on other ranks. Not collective."""
        if self._ranks is not None:
            self._ranks[0].at(key)

    def log_metrics(
        self,
        logger: logging.Logger,
        num_bytes: int,
        *,
        path: str = "",
        failures: int = 0,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Logs bytes, ranks and seconds of the finished operation, on the coordinator. Not collective.

        ``more`` has metrics that only some operations have.
        """
        if self.is_coordinator:
            log_metrics(
                logger,
                self._operation,
                path=path or self._path,
                ranks=self.size,
                num_bytes=num_bytes,
                phase_seconds=self.seconds,
                retries=self.num_retries,
                failures=failures,
                more=more or {},
            )

    def seconds_so_far(self) -> dict[str, float]:
        """``seconds``, and those of the phase in which this is called. Not collective."""
        name, begin = self._current
        return {**self.seconds, name: self.seconds.get(name, 0.0) + clock.now() - begin}

    def refuse(self, error: Exception) -> None:
        """Tells the other ranks that this one has refused its arguments. Collective, in place of the call's phases.

        Raises:
            WrongArgumentError: What ranks have refused. The same on every rank; a process alone raises nothing.
            LostRankError: A rank is gone or does not take part.
        """
        if self._ranks is not None:
            watch, exchange = self._ranks
            watch.begin("arguments", "ranks checked their arguments; nothing was changed")
            text = str(error) if str(error).startswith(self._call) else f"{self._call}: {error}"
            exchange.heads(text.encode(errors="replace"), Opening(self._call, REFUSED))

    def confirm(self) -> None:
        """Raises LostRankError where other ranks gave up while this process was stopped. Not collective."""
        if self._ranks is not None:
            self._ranks[0].confirm()

    @contextmanager
    def changing(self, changed: tuple[str, ...], doing: str) -> Iterator[None]:
        """Around phases in which ranks do this. Components that they change may be part-written if a rank fails."""
        self._changed, self._changing = changed, doing
        try:
            yield
        finally:
            self._changed, self._changing = (), ""

    def on_all(
        self,
        name: str,
        work: Callable[[], T],
        *,
        doing: str = "",
        places: Sequence[PlaceOfRank] | None = None,
        hold_the_same: Callable[[list[T]], bool] = lambda _: False,
        exchange_name: str = "",
    ) -> list[T]:
        """The results of all ranks, on all ranks.

        Args:
            name: Name of the phase, for messages and ``seconds``.
            work: Called on each rank.
            doing: What the ranks are doing, to follow "while" in messages; by default as told by ``changing``.
            places: This rank's checkpoints; where ranks name different ones, that is the error, whatever else failed.
            hold_the_same: Whether the results show that different places hold copies of one checkpoint, which is fine.
            exchange_name: Where ``work`` waits for other ranks: a name that no other such work on the group has, the
                same on all ranks. What one rank raises is then announced through the store, and no rank goes on to the
                end of the phase while another one still works; the error of the group that is lost meanwhile is not
                told, but the one that was announced.
        """
        with self._phase(name, doing):
            data = self._own_part(work, exchange_name)
            if self._ranks is None:
                return _values([data])
            watch, exchange = self._ranks
            if places is None:
                try:
                    return _values(exchange.rest_on_all(data, exchange.heads(data, self._opening(name))))
                except LostRankError as lost:
                    if watch.announced is None or lost.silent or lost.late:
                        raise
                    rank, error = watch.announced
                    raise PhaseFailure({rank: error}, advice=f"; {watch.advice}") from None
            data = pickle.dumps((tuple(places), data))
            parts = exchange.rest_on_all(data, exchange.heads(data, self._opening(name)))
            try:
                found = [(of_rank, part) for of_rank, part in map(pickle.loads, parts)]
            except Exception:
                # A late rank may get a message of an operation that the other ranks have given up.
                self.confirm()
                raise
            problems = place_problems([of_rank for of_rank, _ in found])
            refused = PhaseFailure({self.rank: refusal(self._operation, problems)}) if problems else None
            try:
                values = _values([part for _, part in found])
            except PhaseFailure as failure:
                raise refused or failure from None
            if refused is not None and not hold_the_same(values):
                raise refused
            return values

    def through_coordinator(
        self, name: str, work: Callable[[], T], on_coordinator: Callable[[list[T]], list[R]], *, doing: str = ""
    ) -> R:
        """This rank's part of what the coordinator makes from all results. Arguments as in ``on_all``."""
        with self._phase(name, doing):
            parts = self._coordinators_parts(name, "", work, on_coordinator, self.size)
            return cast(R, _value(parts[0] if self._ranks is None else self._ranks[1].scatter(parts)))

    def to_coordinator(
        self, name: str, work: Callable[[], T], on_coordinator: Callable[[list[T]], R], *, then: str = "", doing: str
    ) -> R:
        """What the coordinator makes from all results, the same on every rank. Arguments as in ``on_all``.

        Args:
            then: The name of the coordinator's part in messages.
        """
        with self._phase(name, doing):
            parts = self._coordinators_parts(name, then, work, lambda results: [on_coordinator(results)], 1)
            return cast(R, _value(parts[0] if self._ranks is None else self._ranks[1].broadcast(b"".join(parts))))

    def _coordinators_parts(
        self,
        name: str,
        then: str,
        work: Callable[[], T],
        on_coordinator: Callable[[list[T]], list[R]],
        num_parts: int,
    ) -> list[bytes]:
        """What the coordinator makes from all results, or its failure; nothing on other ranks, which wait for it."""
        data = self._own_part(work)
        gathered: Sequence[bytes | memoryview] = [data]
        if self._ranks is not None:
            watch, exchange = self._ranks
            heads = exchange.heads(data, self._opening(name))
            watch.begin(then or name, self._doing)
            gathered = exchange.rest_on_coordinator(data, heads)
            if not self.is_coordinator:
                return []
            # Other ranks may have given up while this process was stopped: then it must commit nothing.
            watch.confirm()
            watch.begin(then or name, self._doing)

        def make() -> list[bytes]:
            parts = [pickle.dumps(part) for part in on_coordinator(_values(gathered))]
            if len(parts) != num_parts:
                raise ValueError(f"the coordinator made {len(parts)} parts for {num_parts} ranks")
            return parts

        made = _attempt(make, self.rank)
        return [pickle.dumps(made)] * num_parts if isinstance(made, PhaseFailure) else made

    def _own_part(self, work: Callable[[], T], exchange_name: str = "") -> bytes:
        """This rank's result, or error, as it travels. ``exchange_name`` is as in ``on_all``."""

        def make() -> bytes:
            if self._ranks is not None and self._ranks[0].start_error is not None:
                raise self._ranks[0].start_error
            try:
                result = work()
            finally:
                self._check_not_destroyed()
            return pickle.dumps(result)

        watch = self._ranks[0] if self._ranks is not None and exchange_name else None
        if watch is not None:
            watch.enter_exchange(exchange_name)
        made = _attempt(make, self.rank)
        if watch is not None:
            failed = made if isinstance(made, PhaseFailure) else None
            error = None if failed is None else next(iter(failed.errors.values()))
            # An error of the backend follows from a rank that is lost or late, which the end of the phase finds.
            is_echo = watch.leave_exchange(None if isinstance(error, dist.DistError) else error)
            if failed is not None:
                made = PhaseFailure(failed.errors, failed.of_storage, is_echo=is_echo)
        return pickle.dumps(made) if isinstance(made, PhaseFailure) else made

    def _check_not_destroyed(self) -> None:
        """Raises where the exchanges need process groups of the job that are gone by now."""
        if self.group is None or self.is_beside:
            return
        if not dist.is_initialized():
            raise RuntimeError(
                f"destroy_process_group was called before the {self._operation} had ended; wait for its result() first"
            )

    def _opening(self, name: str) -> Opening:
        return Opening(self._call, f"phase {name} of {self._call}")

    @contextmanager
    def _phase(self, name: str, doing: str) -> Iterator[None]:
        watch = None if self._ranks is None else self._ranks[0]
        self._doing = doing or self._changing
        self._current = name, clock.now()
        if self._turn is not None:
            self._turn.in_phase = threading.get_ident()
        with timed(self.seconds, name):
            try:
                if watch is not None:
                    watch.begin(name, self._doing)
                yield
                if watch is not None:
                    watch.confirm()
            except PhaseFailure as failure:
                own = failure.errors.get(self.rank)
                if isinstance(own, (KeyboardInterrupt, SystemExit)):
                    self._is_told = True
                    raise own from None
                raise self._known_to_all(self._own_error(failure, name)) from None
            except (LostRankError, DifferentCallsError, StateRefusedError) as error:
                self._known_to_all(error)
                raise
            except BaseException as error:
                if watch is not None:
                    watch.leave(error)
                raise
            finally:
                if self._turn is not None:
                    self._turn.in_phase = None

    def _known_to_all(self, error: TorchtitanExtError) -> TorchtitanExtError:
        """The error, which is the same on every rank."""
        if isinstance(error, StateRefusedError) and not self.is_coordinator:
            leave_report_to_rank_0(error, self.rank)
        return error

    def _own_error(self, failure: PhaseFailure, name: str) -> TorchtitanExtError:
        errors = failure.errors
        ours = next((error for error in errors.values() if isinstance(error, TorchtitanExtError)), None)
        if ours is not None and not self._changed and not failure.advice:
            return ours
        texts = {rank: f"{type(error).__name__}: {error}{failure.advice}" for rank, error in errors.items()}
        is_soft = failure.of_storage.issuperset(errors)
        was_interrupted = not all(isinstance(error, Exception) for error in errors.values())
        return CheckpointFailedError(
            self._operation, texts, self._changed, name, self._path, is_soft, was_interrupted=was_interrupted
        )


def key_of(group: dist.ProcessGroup | None) -> object:
    """What stands for a group, or a process alone, in a ``WeakKeyDictionary``: of one that was destroyed nothing is
    left."""
    return Phases if group is None else group


def call_text(operation: str, **options: object) -> str:
    """A call as other ranks get to know it: with the options that must be the same on all ranks, where they are given.

    ``load(prove=True)``
    """
    given = ", ".join(f"{name}={value!r}" for name, value in options.items() if value)
    return f"{operation}({given})" if given else operation


@contextmanager
def checking_arguments(
    operation: str, group: dist.ProcessGroup | None = None, *, no_dist: bool = False
) -> Iterator[None]:
    """Around the checks of a collective call's arguments: an error on one rank alone becomes an error of all.

    Collective where they raise: the rank takes part in the call's first exchange, to tell the others.

    Raises:
        WrongArgumentError: Some ranks refuse their arguments, or all do and for different reasons; names them. The same
            on every rank.
        Exception: What the checks raise; where all ranks raise the same, or the others cannot be told.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(group, dist.ProcessGroup | None):
            raise
        told: WrongArgumentError | None = None
        with suppress(Exception), Phases(operation, group, no_dist=no_dist) as phases:
            try:
                phases.refuse(error)
            except WrongArgumentError as refused:
                if len(refused.problems) < phases.size or len({problem.detail for problem in refused.problems}) > 1:
                    told = refused
        if told is not None:
            raise told from error
        raise


def _attempt(work: Callable[[], T], rank: int) -> T | PhaseFailure:
    """The result of the work, or a ``PhaseFailure`` with its error."""
    try:
        return work()
    except PhaseFailure as failure:
        return failure
    except BaseException as error:
        return PhaseFailure({rank: readable_error(error)}, frozenset([rank] if is_of_storage(error) else []))


def _value(data: bytes | memoryview) -> Any:
    value = pickle.loads(data)
    if isinstance(value, PhaseFailure):
        raise value
    return value


def _values(gathered: Sequence[bytes | memoryview]) -> list[Any]:
    """The results of all ranks.

    Raises:
        PhaseFailure: Holds the errors of all ranks that failed.
    """
    values: list[Any] = []
    errors: dict[int, BaseException] = {}
    of_storage: set[int] = set()
    echoes: dict[int, BaseException] = {}
    for rank, data in enumerate(gathered):
        try:
            values.append(_value(data))
        except PhaseFailure as failure:
            (echoes if failure.is_echo else errors).update(failure.errors)
            of_storage |= failure.of_storage
        except Exception as error:
            errors[rank] = RuntimeError(f"its result cannot be read back: {type(error).__name__}: {error}")
    if errors or echoes:
        raise PhaseFailure(errors or echoes, frozenset(of_storage))
    return values
