"""The rules that are used where none are given: one for each role that a tree tells."""

from muon_optax._internal.tree_paths import Segments
from muon_optax.partition.rules import RolePattern, Rule, first_rules
from muon_optax.partition.tree import TRANSPOSED, Role
from muon_optax.views.matrix_view import MuonDimensionNumbers

__all__ = ["ADAM_RULES", "MATRIX_RULES", "default_rules", "rule_by_name"]

_ANY_SIZE = 512  # in which no window, stack, few outputs or vocabulary can be seen


def _adam(role: Role, reason: str, warning: str | None = None) -> Rule:
    return Rule(RolePattern(role), "adam", reason, optional=True, warning=warning)


def _muon(role: Role, reason: str, warning: str | None = None) -> tuple[Rule, ...]:
    """The rule of matrices [in, out], and that of the same kind kept as [out, in]."""
    as_kept = Rule(RolePattern(role), "muon", reason, optional=True, warning=warning)
    if role not in TRANSPOSED:
        return (as_kept,)
    transposed, view = RolePattern(TRANSPOSED[role]), MuonDimensionNumbers(1, 0)
    as_rule = Rule(transposed, "muon", f"{reason}, [out, in]", view, True, warning)
    return (as_kept, as_rule)


ADAM_RULES = (
    _adam("vector", "fewer than two dims"),
    _adam("bias", "bias or scale"),
    _adam("thin", "one dim above 1"),
    _adam("norm", "norm"),
    _adam("quantisation", "scale of quantised weights"),
    _adam("lora", "LoRA factor"),
    _adam("embedding", "embedding"),
    _adam("table", "table"),
    _adam("tall_table", "as tall as a vocabulary, and no layer takes so many inputs"),
    _adam("head", "head"),
    _adam("output", "head by its shape: no layer takes its outputs"),
    _adam("few_outputs", "head by its shape: four outputs or fewer"),
    _adam("depthwise", "depthwise kernel"),
    _adam(
        "one_channel",
        "depthwise kernel, or a first convolution of one channel",
        "convolutions of one input channel get AdamW, as depthwise kernels; a first layer of grey "
        "images or sound is a matrix",
    ),
    _adam(
        "wide_output",
        "perhaps a head: no layer takes its outputs",
        "matrices whose outputs no other layer takes get AdamW, as output heads; a hidden layer is "
        "Muon's",
    ),
    _adam(
        "stacked_vector",
        "a stack of vectors, by the stacks beside it",
        "leaves that look like stacked vectors (first dim as that of a stack beside them) get "
        "AdamW",
    ),
    _adam(
        "unconnected",
        "perhaps a table: no other layer has its sizes",
        "matrices without a bias that share no size with other layers get AdamW, as tables whose "
        "rows are concatenated with others; a hidden layer is Muon's",
    ),
)

MATRIX_RULES = (
    *_muon("matrix", "weight matrix"),
    *_muon(
        "matrix_of_unknown_order",
        "weight matrix, taken as [in, out]",
        "nothing tells whether these weights are [in, out] or [out, in], on which a scale depends; "
        "they are taken as [in, out]",
    ),
    *_muon(
        "inner_head",
        "weight matrix, though called a head or an output",
        "matrices that are called heads or outputs get Muon, since their outputs are as wide as "
        "hidden layers",
    ),
    *_muon(
        "data_output",
        "weight matrix, though its outputs are as many as the data's features",
        "matrices that give as many outputs as the model takes inputs get Muon; a last layer that "
        "reconstructs the data is AdamW's",
    ),
    *_muon(
        "unnamed",
        "weight matrix without a name",
        "leaves without names, as in lists or in containers registered without names "
        "(jax.tree_util.register_pytree_node), get Muon by their shapes alone; a table or a head "
        "among them is AdamW's",
    ),
    *_muon(
        "bare_parameter",
        "weight matrix, though not called a weight",
        "arrays with names of their own, beside layers that call theirs 'weight' or 'kernel', get "
        "Muon as matrices; a table among them is AdamW's",
    ),
    *_muon(
        "possible_table",
        "weight matrix, though like a table by its sizes or its missing bias",
        "matrices without a bias, where other layers have one or none has their sizes, get Muon; a "
        "table among them, whose rows are looked up or added, is AdamW's",
    ),
    *_muon(
        "possible_head",
        "weight matrix, though no layer is seen that takes its outputs",
        "matrices outside of the repeated layers get Muon, though nothing shows a layer that takes "
        "their outputs; a last layer among them is AdamW's",
    ),
)


def default_rules() -> tuple[Rule, ...]:
    """The rules used where none are given.

    Each is of a role, which names and shapes of the whole tree tell: words of names ('embed',
    'norm', 'lora'), biases beside, sizes that other layers take as inputs, repeated layers. A leaf
    of three dims or more that none of them matches gets AdamW, with a warning: nothing declares
    which of its axes make a matrix.

    Returns:
      An ordered tuple, to be put after rules of one's own: `partition=(Rule(...),
      *default_rules())`.

    Example:
      >>> for rule in default_rules()[:3]:
      ...     print(rule, "|", rule.reason)
      role 'vector' -> 'adam' | fewer than two dims
      role 'bias' -> 'adam' | bias or scale
      role 'thin' -> 'adam' | one dim above 1
    """
    return (*ADAM_RULES, *MATRIX_RULES)


def rule_by_name(segments: Segments, rank: int) -> Rule | None:
    """The default rule that a path alone calls for, whatever its leaf's sizes.

    Args:
      segments: the path.
      rank: how many dims the leaf has.

    Returns:
      A rule of AdamW's; None where the path is called like a hidden layer's weight.

    Example:
      >>> rule_by_name(("tok_embed", "weight"), 2).reason, rule_by_name(("up", "weight"), 2)
      ('embedding', None)
    """
    # Dims of one size say nothing, and so names decide.
    (rule,) = first_rules(default_rules(), [(segments, (_ANY_SIZE,) * rank)])
    return rule if rule is not None and rule.label == "adam" else None
