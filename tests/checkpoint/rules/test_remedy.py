"""The policy that would make a refused load go."""

from torchtitan_ext.checkpoint.rules.load_rules import ComponentPlan
from torchtitan_ext.checkpoint.rules.policy import ElasticPolicy
from torchtitan_ext.checkpoint.rules.report import find_remedy, joined_remedy
from torchtitan_ext.errors import Problem

COMPONENTS = {name: ComponentPlan("reshard") for name in ("model", "optimizer", "dataloader")}


def remedy(
    *problems: Problem, policy: ElasticPolicy | None = None, wanted: tuple[str, ...] = ()
) -> ElasticPolicy | None:
    return find_remedy(problems, policy or ElasticPolicy(), COMPONENTS, wanted)


def test_a_component_that_cannot_cross_starts_anew() -> None:
    found = remedy(
        Problem("cannot_reshard", "dataloader", "no"), Problem("unclaimed_keys", "dataloader.dp_rank_*", "no")
    )
    assert found is not None and found.actions == {"dataloader": "reset"}


def test_missing_and_unexpected_keys_are_named_by_the_widest_glob_without_others() -> None:
    problems = [Problem("missing_key", f"model.new.{name}", "no") for name in ("w", "b")]
    problems += [Problem("unexpected_key", "model.old.w", "no")]
    found = remedy(*problems, wanted=("model.layers.w",))
    assert found is not None and found.actions == {"model.new.*": "reset", "model.old.w": "omit"}


def test_a_long_list_is_ignored_as_a_whole() -> None:
    found = remedy(*[Problem("missing_key", f"model.{index}.w", "no") for index in range(30)])
    assert found is not None and found.actions == {} and found.strict == "ignore"


def test_nothing_helps_where_layouts_are_in_doubt() -> None:
    assert remedy(Problem("layout_in_doubt", "model.w", "no"), Problem("missing_key", "model.b", "no")) is None


def test_what_the_policy_says_already_stays() -> None:
    policy = ElasticPolicy({"optimizer": "omit"}, default="keep", strict="warn")
    found = remedy(Problem("wrong_shape", "model.w", "no"), policy=policy)
    assert found is not None
    assert found.actions == {"model.w": "reset", "optimizer": "omit"}
    assert (found.default, found.strict) == ("keep", "warn")


def test_a_component_as_a_whole_takes_the_place_of_its_keys() -> None:
    found = remedy(Problem("cannot_reshard", "optimizer", "no"), Problem("wrong_shape", "optimizer.state.w", "no"))
    assert found is not None and found.actions == {"optimizer": "reset"}


def test_remedies_of_several_sources_come_together() -> None:
    policy = ElasticPolicy({"model": "keep"})
    joined = joined_remedy(
        [
            ElasticPolicy({"model": "keep", "a": "reset"}),
            ElasticPolicy({"model": "keep", "b": "omit"}, strict="ignore"),
        ],
        policy,
    )
    assert joined is not None
    assert joined.actions == {"a": "reset", "b": "omit", "model": "keep"} and joined.strict == "ignore"


def test_no_remedy_for_one_source_is_none_for_all() -> None:
    assert joined_remedy([ElasticPolicy({"a": "reset"}), None], ElasticPolicy()) is None
    assert joined_remedy([], ElasticPolicy()) is None
