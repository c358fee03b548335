"""The loop that runs a pool: schedule, ask the controller, compute, sample, deliver."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from prefixd.worker.engine_statistics import EngineStatistics
from prefixd.worker.errors import (
    WorkerBroken,
    WorkerError,
    controller_unavailable,
    draining,
    internal_failure,
)
from prefixd.worker.execution import PassRunner
from prefixd.worker.generation import Generation, Growth
from prefixd.worker.limits import FORWARD_FAILURES_MAX, LIVE_SEQUENCES_MAX, SchedulerLimits
from prefixd.worker.logs import Log
from prefixd.worker.plan_check import PlanInvalid, PoolShape
from prefixd.worker.reading import LogitRead, LogitReading
from prefixd.worker.reload import WeightChange
from prefixd.worker.rpc.controller_client import (
    ControllerClient,
    ControllerSilent,
    EpochEnded,
    Registration,
    StepRefused,
)
from prefixd.worker.rpc.step_messages import step_answer, step_request
from prefixd.worker.scheduler import Scheduler
from prefixd.worker.sequence import Sequence
from prefixd.worker.step import Applied, CloseReason, PassPlan, PlannedChunk, Rejection, StepDraft

VERSION_RETRY_S = 0.1
"""How soon the controller is told of new weights again, where it could not be told."""


class Engine:
    """Answers grow here, many at a time.

    One step is out at a time: it is planned, computed to its end, and reported by the next one. The
    forward pass runs in a thread, so that streams and health stay responsive.

    Invariants: every request that was submitted ends, with its answers or an error; a plan is
    executed at most once; no step is reported as executed whose pass did not run to its end.
    """

    def __init__(
        self,
        client: ControllerClient,
        runner: PassRunner,
        *,
        shape: PoolShape,
        limits: SchedulerLimits,
        model_version: str,
        controller_wait_s: float,
        clock_s: Callable[[], float],
        log: Log,
    ) -> None:
        """Makes an engine that `run` brings to life.

        Args:
            client: of the controller.
            runner: executes passes.
            shape: of the pool.
            limits: of a step and of the batch.
            model_version: of the weights that passes run with.
            controller_wait_s: how long running answers wait for a lost controller.
            clock_s: monotonic seconds.
            log: for lifecycle events.
        """
        self._client = client
        self._runner = runner
        self._scheduler = Scheduler(shape, limits)
        self._model_version = model_version
        self._weight_change: WeightChange | None = None
        self._controller_wait_s = controller_wait_s
        self._clock_s = clock_s
        self._log = log
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forward")
        self._generations: dict[Sequence, Generation] = {}
        self._is_draining = False
        self._wake = asyncio.Event()
        self._registration: Registration | None = None
        self._step_id = 0
        self._executed_step_id = 0
        self._failed_step_id = 0
        self._failure_count = 0
        self._is_confirmation_due = False
        self._has_given_up = True  # on the controller: nobody waits for one that never was there
        self._prefill_token_count = 0
        self._decode_token_count = 0

    @property
    def statistics(self) -> EngineStatistics:
        """What it has done, and what it is doing."""
        return EngineStatistics(
            running_sequence_count=self._scheduler.running_count,
            waiting_sequence_count=self._scheduler.waiting_count,
            prefill_token_count=self._prefill_token_count,
            decode_token_count=self._decode_token_count,
            preemption_count=self._scheduler.preemption_count,
        )

    def submit(self, generation: Generation) -> None:
        """Takes a request's sequences in.

        Raises:
            WorkerError: DRAINING, CONTROLLER_UNAVAILABLE, LIMIT_EXCEEDED or SEQUENCE_EXISTS.
        """
        self.check_room(generation.sequence_count_max)
        (sequence,) = generation.sequences
        self._check_name(sequence.sequence_id)
        self._generations[sequence] = generation
        self._scheduler.add(sequence)
        self._wake.set()

    def check_room(self, sequence_count: int) -> None:
        """Raises DRAINING, CONTROLLER_UNAVAILABLE or LIMIT_EXCEEDED unless so many more fit now."""
        self._check_open()
        live_count = sum(one.sequence_count_max for one in set(self._generations.values()))
        if live_count + sequence_count > LIVE_SEQUENCES_MAX:
            raise WorkerError(
                "LIMIT_EXCEEDED",
                f"{live_count} sequences run or wait already, and at most {LIVE_SEQUENCES_MAX} do",
                numbers={
                    "live_sequence_count": live_count,
                    "live_sequence_count_max": LIVE_SEQUENCES_MAX,
                },
            )

    def _check_open(self) -> None:
        if self._is_draining:
            raise draining()
        # A connection that breaks is back in a moment: new requests wait for it as running ones do.
        if self._has_given_up and not self._client.is_ready:
            raise controller_unavailable("the worker has no controller at the moment; try again")

    def _check_name(self, name: str) -> None:
        """Sequences that fork off are called after the first, so a name owns those below it."""
        for live in self._generations:
            first, second = sorted((live.sequence_id, name))
            if first == second or second.startswith(f"{first}/"):
                raise WorkerError(
                    "SEQUENCE_EXISTS",
                    f"sequence {live.sequence_id!r} is running",
                    field="sequence_id",
                )

    def cancel(self, generation: Generation) -> None:
        """Nobody wants the answers any more; their sequences are closed.

        Does nothing if they are over.
        """
        for sequence in generation.sequences:
            if self._generations.pop(sequence, None) is not None:
                self._scheduler.end(sequence, CloseReason.ABORTED)
                self._wake.set()

    @property
    def model_version(self) -> str:
        """Version of the weights that passes run with."""
        return self._model_version

    async def change_weights(self, model_version: str, put_in_place: Callable[[], None]) -> int:
        """Puts weights in place between two steps, and states their version.

        No step is sent before the controller knows the version, so nothing that the new weights
        compute is taken for the old ones' work.

        Returns:
            The number of blocks that the controller dropped.

        Raises:
            WorkerError: DRAINING or CONTROLLER_UNAVAILABLE; nothing has changed.
        """
        assert self._weight_change is None, "one change at a time"
        self._check_open()
        stated = asyncio.get_running_loop().create_future()
        self._weight_change = WeightChange(model_version, put_in_place, stated)
        self._wake.set()
        # The change goes on where the caller goes away: half of it would be worse.
        return await asyncio.shield(stated)

    async def run(self) -> None:
        """Runs steps while there is work, until cancelled.

        Raises:
            ExceptionGroup: of a WorkerBroken, where no pass can be run any more.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._run_steps())
            tasks.create_task(self._give_up_on_lost_controllers())

    async def _run_steps(self) -> None:
        while True:
            registration = await self._client.ready()
            if registration != self._registration:
                self._begin_epoch(registration)
            self._wake.clear()
            if self._is_version_due:
                await self._settle_version(registration)
                continue
            if not self._is_step_due:
                await self._wake.wait()
                continue
            await self._run_step(registration)

    @property
    def _is_version_due(self) -> bool:
        is_stated = self._client.stated_model_version == self._model_version
        return self._weight_change is not None or not is_stated

    async def _settle_version(self, registration: Registration) -> None:
        """Puts new weights in place, and tells the controller; done again until it knows."""
        change = self._weight_change
        if change is not None and not change.is_in_place:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._executor, change.put_in_place)
            change.is_in_place = True
            self._model_version = change.model_version
        try:
            dropped_block_count = await self._client.state_model_version(
                self._model_version, registration
            )
        except EpochEnded:
            return
        except ControllerSilent:
            await asyncio.sleep(VERSION_RETRY_S)
            return
        self._weight_change = None
        if change is not None and not change.stated.done():
            change.stated.set_result(dropped_block_count)

    async def _give_up_on_lost_controllers(self) -> None:
        """Running answers wait for a controller that went away, but not for ever."""
        while True:
            await self._client.ready()
            self._has_given_up = False
            # An idle engine learns of a new epoch only when it is woken.
            self._wake.set()
            await self._client.lost()
            try:
                await asyncio.wait_for(self._client.ready(), self._controller_wait_s)
            except TimeoutError:
                self._has_given_up = True
                self._log.error("controller_lost", answer_count=len(self._generations))
                self._fail_all(
                    controller_unavailable("the controller went away and did not come back in time")
                )

    def drain(self) -> None:
        """Refuses new answers and ends the running ones."""
        self._is_draining = True
        if self._weight_change is not None and not self._weight_change.stated.done():
            self._weight_change.stated.set_exception(draining())
        self._fail_all(draining())

    async def close(self, *, timeout_s: float) -> bool:
        """Waits for a pass that is under way; returns whether it ended in time."""
        last = asyncio.get_running_loop().run_in_executor(self._executor, lambda: None)
        done, _ = await asyncio.wait([last], timeout=timeout_s)
        self._executor.shutdown(wait=False, cancel_futures=True)
        return bool(done)

    @property
    def _is_step_due(self) -> bool:
        return bool(self._scheduler.has_work or self._failed_step_id or self._is_confirmation_due)

    def _begin_epoch(self, registration: Registration) -> None:
        self._registration = registration
        self._step_id = 0
        self._executed_step_id = 0
        self._failed_step_id = 0
        self._is_confirmation_due = False
        self._scheduler.begin_epoch()

    async def _run_step(self, registration: Registration) -> None:
        draft = self._draft()
        try:
            await self._execute_step(draft, registration)
        except EpochEnded:
            self._log.info("answers_wait_for_new_epoch", answer_count=len(self._generations))
        except (StepRefused, PlanInvalid) as error:
            self._log.error("step_disagreed", step_id=self._step_id, error=str(error))
            await self._give_step_up(draft)
        except WorkerBroken:
            raise
        except Exception:
            self._log.error("step_broken", step_id=self._step_id, exc_info=True)
            await self._give_step_up(draft)

    def _draft(self) -> StepDraft:
        if self._failed_step_id:
            # Positions are cut by this step's answer, so nothing can build on them yet.
            return StepDraft(closes=self._scheduler.take_closes())
        return self._scheduler.draft()

    async def _execute_step(self, draft: StepDraft, registration: Registration) -> None:
        step_id = self._step_id + 1
        request = step_request(
            draft,
            step_id=step_id,
            executed_step_id=self._executed_step_id,
            failed_step_id=self._failed_step_id,
        )
        response = await self._client.step(request, registration)
        self._step_id = step_id
        self._failed_step_id = 0
        self._is_confirmation_due = False
        applied = self._scheduler.apply(draft, step_answer(response, draft))
        self._report(applied)
        plan = applied.pass_plan
        if plan.chunks or plan.copies:
            try:
                readings = await self._run_pass(plan)
            except Exception as error:
                self._log.error("pass_failed", step_id=step_id, exc_info=True)
                if isinstance(error, WorkerBroken):
                    raise
                self._count_failure(step_id, plan)
                return
            self._failure_count = 0
            self._is_confirmation_due = True
            self._deliver(plan, readings)
        self._executed_step_id = step_id

    async def _run_pass(self, plan: PassPlan) -> list[LogitReading]:
        reads = [self._read(chunk) for chunk in plan.chunks if chunk.wants_logits]
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._runner.run, plan, reads)

    def _read(self, chunk: PlannedChunk) -> LogitRead:
        generation = self._generations.get(chunk.sequence)
        # It may have failed for another sequence's sake since the plan was laid out.
        return LogitRead() if generation is None else generation.read(chunk)

    def _count_failure(self, step_id: int, plan: PassPlan) -> None:
        self._failed_step_id = step_id
        self._failure_count += 1
        if self._failure_count >= FORWARD_FAILURES_MAX:
            self._failure_count = 0
            error = internal_failure("the model failed; the worker's log holds the cause")
            self._fail_sequences({chunk.sequence for chunk in plan.chunks}, error)

    async def _give_step_up(self, draft: StepDraft) -> None:
        """The controller and we disagree: nothing in this epoch can be relied on any more."""
        error = internal_failure("the step failed; the worker's log holds the cause")
        self._fail_sequences(set(draft.sequences), error)
        await self._client.end_epoch()

    def _report(self, applied: Applied) -> None:
        for sequence, cached_token_count in applied.opened:
            generation = self._generations.get(sequence)
            if generation is not None:
                generation.start(cached_token_count=cached_token_count)
        for rejection in applied.rejections:
            self._reject(rejection)

    def _reject(self, rejection: Rejection) -> None:
        self._log.warning("sequence_rejected", reason=rejection.reason)
        error = WorkerError(rejection.reason, rejection.message, numbers=rejection.numbers)
        self._fail_sequences({rejection.sequence}, error)

    def _deliver(self, plan: PassPlan, readings: list[LogitReading]) -> None:
        now_s = self._clock_s()
        for chunk in plan.chunks:
            token_count = len(chunk.token_ids)
            if chunk.start_position >= chunk.sequence.prompt_token_count:
                self._decode_token_count += token_count
            else:
                self._prefill_token_count += token_count
        read = (chunk for chunk in plan.chunks if chunk.wants_logits)
        for chunk, reading in zip(read, readings, strict=True):
            generation = self._generations.get(chunk.sequence)
            if generation is not None:
                self._grow(generation, generation.take(chunk, reading, now_s=now_s))

    def _grow(self, generation: Generation, growth: Growth) -> None:
        for branch in growth.branches:
            self._generations[branch.child] = generation
            self._scheduler.branch(
                branch.child, parent=branch.parent, token_count=branch.token_count
            )
        for sequence in growth.ended:
            del self._generations[sequence]
            self._scheduler.end(sequence, CloseReason.FINISHED)

    def _fail_all(self, error: WorkerError) -> None:
        self._fail_sequences(set(self._generations), error)

    def _fail_sequences(self, sequences: set[Sequence], error: WorkerError) -> None:
        for sequence in sequences:
            generation = self._generations.get(sequence)
            if generation is not None:
                self.cancel(generation)
                generation.stream.fail(error)
