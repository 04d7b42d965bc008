"""Every exception survives pickling with its fields, alone and inside DCP's wrapper, and its report stays readable."""

import inspect
import pickle
import threading
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

import torchtitan_ext as tte
from torchtitan_ext import errors
from torchtitan_ext.errors import Problem, differing, refusal, warn
from torchtitan_ext.errors.near_names import names_hint, nearest_glob, nearest_name, refuse_unmatched
from torchtitan_ext.errors.refusals import HEADINGS_OF_OPERATIONS, REFUSALS
from torchtitan_ext.storage import FileWriter

PROBLEMS = (
    Problem("missing_key", "model.weight", "Missing key in checkpoint state_dict: model.weight."),
    Problem("wrong_shape", "w", "got (2,), expected (3,)"),
)
INSTANCES = [
    *(
        error_class("save", PROBLEMS)
        for error_class in (
            errors.StateRefusedError,
            errors.LayoutError,
            errors.ReplicaMismatchError,
            errors.SyncMismatchError,
            errors.MissingStateError,
            errors.ReshardError,
            errors.TransformError,
            errors.WrongArgumentError,
        )
    ),
    errors.WrongValueError("mesh: got dp=0, expected at least 1"),
    errors.WrongValueError("got no axis", "mesh", "; pass one", errors.Remedy("placements", "*=ring:0")),
    errors.CheckpointReadError("trainer.step", "its bytes are damaged"),
    errors.DamagedValueError("trainer.step", "its bytes are damaged"),
    errors.DamagedCheckpointError("step-3/__0_0.distcp: bytes 0 to 9 do not match their checksum; in them lie w[0:2]"),
    errors.LostRankError("sync_module_states", "tensors were sent", 2, (1,), "Connection reset by peer"),
    errors.SaveInProgressError("run/step-3", "process 7 on node1 since 12:00:00", "run/.tte_save-1"),
    errors.ProofFailedError(
        "run/step-3",
        ("w", "v"),
        (
            errors.WrongPart("w", "__0_0.distcp", (0, 2), (4, 2), (1, 3), False),
            errors.WrongPart("v", "__1_0.distcp", (), (), (0,), None),
        ),
    ),
    errors.SavedOverError("run/step-3", "__0_0.distcp is gone"),
    errors.NoCheckpointError("run", "got step=3, expected one of 1, 2"),
    errors.AbsentRunError("/mnt/run", "/local/run-0123456789ab", 4),
    errors.UnknownFormatError("model", "the directory is empty"),
    errors.UnknownOutcomeError("s3://bucket/run/step-3", "3f" * 16, "it answers 500"),
    errors.UnsafePickleError("model.pt", "it names os.system"),
    errors.WorkerLostError(-9),
    errors.DifferentCallsError({0: "save", 1: "reshard", 2: "save"}),
    errors.TransferFailedError("reshard", {1: "ValueError: x"}, ("w",), "exchange"),
    errors.CannotInstallError("torch 3.0 has no function _save_state_dict"),
    errors.OtherTorchtitanError("knows torchtitan 0.3.0, and this is another"),
    errors.CannotReshardError("saved with 8 shards, this run has 12", "choose num_shards=24"),
    errors.CheckpointFailedError("load", {3: "OSError: disk full", 5: "ValueError: no"}),
    errors.TorchtitanExtError("general"),
]


def test_every_exception_class_is_tried_here() -> None:
    classes = {member for _, member in inspect.getmembers(errors, inspect.isclass) if issubclass(member, Exception)}
    assert classes == {type(instance) for instance in INSTANCES}


@pytest.mark.parametrize("error", INSTANCES, ids=lambda error: type(error).__name__)
def test_an_exception_survives_pickling(error: errors.TorchtitanExtError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and isinstance(again, Exception)
    assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))


@pytest.mark.parametrize("error", INSTANCES, ids=lambda error: type(error).__name__)
def test_an_exception_survives_inside_the_wrapper_of_dcp(error: errors.TorchtitanExtError) -> None:
    wrapped = pickle.loads(pickle.dumps(CheckpointException("plan", {2: _wrap_exception(error)})))
    inner = wrapped.failures[2][0]
    assert type(inner) is type(error) and vars(inner) == vars(error)


@pytest.mark.parametrize("base", [RuntimeError, ValueError])
def test_a_refusal_is_what_stock_raised(base: type[Exception]) -> None:
    with pytest.raises(base, match="Missing key in checkpoint"):
        raise refusal("load", [PROBLEMS[0]])


def test_problems_of_one_class_give_that_class_and_others_the_common_one() -> None:
    assert type(refusal("load", [PROBLEMS[0]])) is errors.MissingStateError
    assert type(refusal("load", [PROBLEMS[1]])) is errors.ReshardError
    assert type(refusal("load", PROBLEMS)) is errors.StateRefusedError


def test_a_problem_that_many_ranks_report_is_listed_once() -> None:
    assert refusal("load", [PROBLEMS[0]] * 8).problems == PROBLEMS[:1]


def test_the_report_groups_by_kind_and_shows_ten_lines_of_each() -> None:
    many = [Problem("missing_key", f"layers.{index}", f"has {index} of 30 ranks") for index in range(25)]
    lines = str(refusal("load", [*many, PROBLEMS[1]])).splitlines()
    assert lines[0] == "load refused, nothing was changed; 26 problem(s):"
    assert lines[1] == "Missing key in checkpoint (25):"
    assert lines[2] == "  layers.0: has 0 of 30 ranks"
    assert lines[12:] == ["  ... and 15 more", "Size mismatch (1):", "  w: got (2,), expected (3,)"]


def test_keys_of_one_sentence_share_a_line() -> None:
    many = [Problem("missing_key", f"w.{index}", f"Missing key in checkpoint: w.{index}.") for index in range(25)]
    few = [Problem("wrong_shape", f"b.{index}", "got (2,), expected (3,)") for index in range(3)]
    assert str(refusal("load", [*many, *few, replace(few[0], fqn="c", detail="got no tensor")])).splitlines()[1:] == [
        "Missing key in checkpoint (25):",
        "  Missing key in checkpoint: w.0 (and 24 more: w.1, w.2, ...).",
        "Size mismatch (4):",
        *(f"  b.{index}: got (2,), expected (3,)" for index in range(3)),
        "  c: got no tensor",
    ]


def test_keys_that_look_like_values_share_no_line() -> None:
    texts = {str(key): f"has {key} rows, expected 9" for key in range(4)}
    error = refusal("load", [Problem("wrong_shape", key, text) for key, text in texts.items()])
    assert str(error).splitlines()[2:] == [f"  {key}: {text}" for key, text in texts.items()]


def test_ranks_that_give_other_values_are_named() -> None:
    assert differing("step", []) == differing("step", [2]) == differing("step", [2, 2, 2]) == []
    (problem,) = differing("step", [2, 3, 2, None, 3], advice="give one")
    assert problem.kind == "ranks_disagree"
    assert str(problem) == "step: is 2 on ranks 0, 2, 3 on ranks 1, 4, None on rank 3; give one"
    (problem,) = differing("plan", [b"a", b"b"], ranks=[4, 6], show=None)
    assert str(problem) == "plan: is not the same on rank 4 and on rank 6"
    assert differing("rename", [{"a": 1, "b": 2}, {"b": 2, "a": 1}]) == []


def test_every_kind_of_problem_has_a_heading_and_a_class() -> None:
    kinds = set(errors.ProblemKind.__args__)  # type: ignore[attr-defined]
    assert kinds == set(REFUSALS)


def test_a_failure_names_its_ranks() -> None:
    assert str(INSTANCES[-2]) == "load failed on 2 rank(s): rank 3: OSError: disk full; rank 5: ValueError: no"


@pytest.mark.parametrize(
    ("value", "got"),
    [(None, "None"), (3, "3"), ("x" * 99, "a str"), (dict, "the class dict"), (PROBLEMS[0], "a Problem")],
)
def test_a_wrong_type_is_named(value: object, got: str) -> None:
    with pytest.raises(TypeError) as caught:
        errors.check_argument("save", "state_dict", value, list, "a list")
    assert str(caught.value) == f"save: got state_dict={got}, expected a list"
    errors.check_argument("save", "state_dict", [], list, "a list")


KEYS = ["model.layers.0.w", "optimizer.state.layers.0.w.exp_avg", "dataloader.step"]


@pytest.mark.parametrize(
    ("glob", "meant"),
    [
        ("modle", "model"),
        ("optimiser.state.*.exp_avgs", "optimizer.state.*.exp_avg"),
        ("model.layers.17.w", None),  # a number is another layer, not a misspelt one
        ("model.lorra*", None),
        ("ema", None),
        ("modle*", "model*"),
        ("*.exp_avs*", "*.exp_avg*"),
        ("mode*", None),  # it matches
        ("*", None),
    ],
)
def test_misspelt_words_of_a_glob_are_found(glob: str, meant: str | None) -> None:
    assert nearest_glob(glob, KEYS) == meant


def test_a_glob_that_matches_nothing_is_refused_where_there_are_names() -> None:
    refuse_unmatched("only", ["model.*", "*.w"], KEYS, where="step-3")
    refuse_unmatched("only", ["model.*"], [], where="step-3")
    with pytest.raises(
        errors.WrongValueError, match=r"^only: got 'modle\.\*', which .* no key of step-3; perhaps 'model\.\*'"
    ):
        refuse_unmatched("only", ["*.w", "modle.*"], KEYS, where="step-3")


def test_a_name_that_is_not_there_is_answered_with_those_that_are() -> None:
    assert nearest_name("datalader.step", KEYS) == "dataloader.step"
    assert nearest_name("datalader", KEYS, likeness=0.8) is None
    assert names_hint("modle", KEYS) == "perhaps 'model' is meant; there are model, optimizer, dataloader"
    assert names_hint("ema", KEYS) == "there are model, optimizer, dataloader"
    assert names_hint("ema", []) == "there are none"


@pytest.mark.parametrize("kind", ["unsupported_tensor", "unsupported_value", "partial_placement"])
def test_refusals_of_loads_have_headings_of_their_own(kind: errors.ProblemKind) -> None:
    texts = {operation: str(refusal(operation, [Problem(kind, "w", "no")])) for operation in ("save", "load")}
    assert (
        f"{REFUSALS[kind][1]} (1):" in texts["save"] and f"{HEADINGS_OF_OPERATIONS['load'][kind]} (1):" in texts["load"]
    )
    assert "cannot be filled" in texts["load"] and "cannot be written" not in texts["load"]


def test_warnings_point_at_the_line_that_called(tmp_path: Path) -> None:
    tte.save({"w": torch.ones(2)}, tmp_path, no_dist=True)
    for save in (partial(tte.save, no_dist=True), dcp.save):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            save({"w": torch.ones(2)}, storage_writer=FileWriter(tmp_path))
        (found,) = [one for one in caught if "is overwritten" in str(one.message)]
        assert found.filename == __file__


def test_every_warning_goes_through_one_function() -> None:
    sources = Path(tte.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if "warnings.warn(" in path.read_text()] == ["checks.py"]


def test_warnings_of_threads_point_at_themselves() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread = threading.Thread(target=warn, args=("of a thread",))
        thread.start()
        thread.join()
    assert [str(one.message) for one in caught] == ["of a thread"]
