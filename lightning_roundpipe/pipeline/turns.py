"""A microbatch's way through the stages: which turn it waits for, and when it gives one up."""

from lightning_roundpipe.pipeline.batch import Batch, Microbatch
from lightning_roundpipe.pipeline.tape import Call
from lightning_roundpipe.pipeline.turnstile import Turnstiles
from lightning_roundpipe.schedules import Action

Lines = list[list[tuple[int, Action]]]
"""The turns on each device, and in the last one those to begin with the step, by batch."""


def start_turn(microbatch: int) -> Action:
    """The turn to begin with the step."""
    return Action("F", -1, microbatch)


def serial_turn(microbatch: int, *, backward: bool) -> Action:
    """The turn of a whole forward or backward, where microbatches run one after the other."""
    return Action("B" if backward else "F", int(backward), microbatch)


def _one_by_one(batch: Batch) -> bool:
    """Whether a microbatch has one turn for its whole forward, and one for its backward."""
    return batch.serial and not batch.splits_calls  # such a step has the pipeline for itself


class Turns:
    """Takes microbatches from stage to stage, forward only, whatever calls they make.

    Stages that a microbatch does not come to are passed; calls that the plan does not foresee run where it is. So every
    turn in line is either taken or given up, and no control flow can deadlock.
    """

    def __init__(self, turnstiles: Turnstiles) -> None:
        self._turnstiles = turnstiles

    def begin_step(self, microbatch: Microbatch) -> None:
        """Waits until the microbatch may begin with its step."""
        if not microbatch.batch.serial:
            self._turnstiles.enter((microbatch.batch.number, start_turn(microbatch.number)))
        elif _one_by_one(microbatch.batch):
            self._enter_serial(microbatch, backward=False)

    def let_next_begin(self, microbatch: Microbatch) -> None:
        """Lets the next microbatch begin with its step, where they take turns."""
        self._turnstiles.leave((microbatch.batch.number, start_turn(microbatch.number)))

    def end_step(self, microbatch: Microbatch) -> None:
        """After the forward: lets the next microbatch begin, where they run one after the other."""
        if _one_by_one(microbatch.batch):
            self._leave_serial(microbatch, backward=False)

    def begin_backward(self, microbatch: Microbatch) -> None:
        """Waits until the backward may begin, where microbatches run one after the other."""
        if _one_by_one(microbatch.batch):
            self._enter_serial(microbatch, backward=True)

    def end_backward(self, microbatch: Microbatch) -> None:
        """Nothing more comes: lets the next microbatch go on, where they run one after the other."""
        if _one_by_one(microbatch.batch):
            self._leave_serial(microbatch, backward=True)

    def _enter_serial(self, microbatch: Microbatch, *, backward: bool) -> None:
        self._turnstiles.enter((microbatch.batch.number, serial_turn(microbatch.number, backward=backward)))
        microbatch.batch.begin_action(microbatch.device, serial_turn(microbatch.index, backward=backward))

    def _leave_serial(self, microbatch: Microbatch, *, backward: bool) -> None:
        microbatch.batch.end_action(microbatch.device, serial_turn(microbatch.index, backward=backward))
        self._turnstiles.leave((microbatch.batch.number, serial_turn(microbatch.number, backward=backward)))

    def enter_forward(self, microbatch: Microbatch, call: Call) -> None:
        """Waits for the turn of the stage that the call belongs to. Finds the call's place in the plan."""
        plan = microbatch.batch.plan
        if plan is None:
            return
        call.position = plan.locate(call.layer.index, microbatch.position)
        if call.position is None:
            return  # unforeseen: runs where the microbatch is
        microbatch.position = call.position + 1
        self._enter_stage(microbatch, plan.forward_stage[call.position])

    def leave_forward(self, microbatch: Microbatch, call: Call) -> None:
        """Ends the turn with the last call of a stage. A fused stage goes on into the backward."""
        plan = microbatch.batch.plan
        if plan is None or call.position is None:
            return
        stage = plan.forward_stage[call.position]
        if stage != plan.fused_stage and call.position == plan.partition.forward[stage][-1]:
            self.leave_ticket(microbatch)

    def enter_backward(self, microbatch: Microbatch, call: Call) -> None:
        """The same for the call's backward."""
        plan = microbatch.batch.plan
        if plan is not None and call.position is not None:
            self._enter_stage(microbatch, plan.backward_stage[call.position])

    def has_turn_of(self, microbatch: Microbatch, call: Call) -> bool:
        """Whether a call's backward runs within the turn that it was planned for."""
        plan = microbatch.batch.plan
        return (
            plan is not None
            and call.position is not None
            and microbatch.ticket is not None
            and plan.backward_stage[call.position] == microbatch.stage
        )

    def comes_back(self, microbatch: Microbatch, call: Call) -> bool:
        """Whether the backward of a call will come to the device that its forward is on now."""
        batch, plan = microbatch.batch, microbatch.batch.plan
        if plan is None or call.position is None:
            return False
        in_turn = plan.forward_stage[call.position] == microbatch.stage
        return in_turn and batch.places[plan.backward_stage[call.position], microbatch.index][0] == microbatch.device

    def leave_backward(self, microbatch: Microbatch, call: Call) -> None:
        """Ends the turn with the backward of the first call of a stage."""
        plan = microbatch.batch.plan
        if plan is None or call.position is None:
            return
        range_ = plan.partition.backward[plan.backward_stage[call.position] - len(plan.partition.forward)]
        if call.position == range_.start:
            self.leave_ticket(microbatch)

    def _enter_stage(self, microbatch: Microbatch, stage: int) -> None:
        """Goes on to a stage; one that lies behind is not entered again, its calls run where the microbatch is."""
        if stage <= microbatch.stage:
            return
        self.leave_ticket(microbatch)
        self.skip_to(microbatch, stage)
        ticket = self._ticket(microbatch, stage)
        self._turnstiles.enter(ticket)
        microbatch.ticket = ticket
        microbatch.stage = stage
        microbatch.device, kind = microbatch.batch.places[stage, microbatch.index]
        microbatch.batch.begin_action(microbatch.device, Action(kind, stage, microbatch.index))

    def _ticket(self, microbatch: Microbatch, stage: int) -> tuple[int, Action]:
        batch = microbatch.batch
        return batch.number, Action(batch.places[stage, microbatch.index][1], stage, microbatch.number)

    def leave_ticket(self, microbatch: Microbatch) -> None:
        """Ends the present turn."""
        if microbatch.ticket is not None:
            action = Action(microbatch.ticket[1].kind, microbatch.stage, microbatch.index)
            microbatch.batch.end_action(microbatch.device, action)
            self._turnstiles.leave(microbatch.ticket)
            microbatch.ticket = None

    def skip_to(self, microbatch: Microbatch, stage: int) -> None:
        """Gives up the turns of the stages before ``stage``: the microbatch has nothing to do in them."""
        for skipped in range(microbatch.stage + 1, stage):
            self._turnstiles.leave(self._ticket(microbatch, skipped))
        microbatch.stage = max(microbatch.stage, stage - 1)

    def pass_forward(self, microbatch: Microbatch) -> None:
        """After the forward: gives up what is left of it, unless the microbatch has come to its backward."""
        plan = microbatch.batch.plan
        if plan is None:
            return
        fused = plan.fused_stage
        if microbatch.stage < (fused if fused is not None else len(plan.partition.forward)):
            self.leave_ticket(microbatch)
            self.skip_to(microbatch, len(plan.partition.forward))

    def pass_remaining(self, microbatch: Microbatch) -> None:
        """Gives up all turns that are left: nothing more is to be done."""
        plan = microbatch.batch.plan
        if plan is not None:
            self.leave_ticket(microbatch)
            self.skip_to(microbatch, plan.partition.stage_count())
