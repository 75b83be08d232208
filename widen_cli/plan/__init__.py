"""The planner: from a map, the headers of a checkpoint and its config to everything that will be written. Pure; it sees no array."""

from widen_cli.plan.checks import check_names, unread_epsilons
from widen_cli.plan.planner import make_plan
from widen_cli.plan.request import PlanRequest
from widen_cli.plan.result import ConfigChange, Plan, TensorPlan

__all__ = ["ConfigChange", "Plan", "PlanRequest", "TensorPlan", "check_names", "make_plan", "unread_epsilons"]
