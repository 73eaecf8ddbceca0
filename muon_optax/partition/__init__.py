"""Which optimizer each leaf gets, and why: rules, evidence of the tree, and doubts."""

from muon_optax.partition.assignment import (
    NO_VIEW,
    NOT_FLOAT,
    Assignment,
    Decision,
    Partition,
    Views,
    as_rules,
    assign,
    check_rules,
)
from muon_optax.partition.defaults import default_rules, rule_by_name
from muon_optax.partition.rules import (
    LABELS,
    Label,
    RolePattern,
    Rule,
    Shape,
    check_patterns,
    first_match,
    first_rules,
    has_run,
    unmatched,
    words,
)
from muon_optax.partition.warnings import doubts, find_warnings, warn

__all__ = [
    "LABELS",
    "NOT_FLOAT",
    "NO_VIEW",
    "Assignment",
    "Decision",
    "Label",
    "Partition",
    "RolePattern",
    "Rule",
    "Shape",
    "Views",
    "as_rules",
    "assign",
    "check_patterns",
    "check_rules",
    "default_rules",
    "doubts",
    "find_warnings",
    "first_match",
    "first_rules",
    "has_run",
    "rule_by_name",
    "unmatched",
    "warn",
    "words",
]
