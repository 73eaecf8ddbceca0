"""The names of a path: their words, the layer they belong to, and the meaning of these words.

A name is read word by word: 'embed_tokens_per_layer' is (embed, tokens, per, layer), and
'MultiHeadDotProductAttention_0' is (multi, head, dot, product, attention). There is no list of
whole names: the next library writes `segment_embedder` where this one has `token_type_embeddings`.
Which role a leaf has by its words is decided in `roles`.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable

from muon_optax._internal.tree_paths import Segments

__all__ = [
    "ATTENTION",
    "CELL",
    "CONDITION",
    "CONV",
    "DEPTHWISE",
    "EMBEDDING",
    "ENTRY",
    "GATE",
    "HEAD",
    "HEAD_MODULE",
    "HIDDEN",
    "INPUT",
    "LORA",
    "NORM",
    "OF_BLOCK",
    "OUTPUT",
    "PIXELS",
    "POSITION",
    "PROJECTION",
    "QUANTISATION",
    "QUERY_KEY",
    "RECONSTRUCTION",
    "TABLE",
    "VECTOR",
    "LeafName",
    "Meaning",
    "is_index",
    "leaf_name",
    "names_of",
    "tokens",
    "word_set",
]

Tokens = tuple[str, ...]

_SEPARATOR = re.compile(r"[./]")
_TOKEN = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_INDEX = re.compile(r"\d+|<\d+>")
_WEIGHT = frozenset({"weight", "weights", "kernel", "w", "matrix"})
# Names that frameworks put between a layer and its array: PEFT, Haiku, PyTorch's parametrizations.
_WRAPPERS = frozenset(
    {"default", "base_layer", "~", "parametrizations", "raw_value"}
    | {"original", "original0", "original1"}
)
_BOXED = _WEIGHT | {"embedding", "bias", "scale"}  # of which Flax's Variables are a 'value'


@functools.lru_cache(maxsize=2**16)
def names_of(segments: Segments) -> Segments:
    """The path's names as they are; one key of a flat tree may hold several.

    Example:
      >>> names_of(("layers", "0", "Attn.q_proj"))
      ('layers', '0', 'Attn', 'q_proj')
    """
    return tuple(name for s in segments for name in _SEPARATOR.split(s))


@functools.lru_cache(maxsize=2**16)
def tokens(name: str) -> Tokens:
    """The words of a name in lower case, without numbers.

    Example:
      >>> tokens("relPos_bias-table2"), tokens("A_log"), tokens("LayerNorm_0")
      (('rel', 'pos', 'bias', 'table'), ('a', 'log'), ('layer', 'norm'))
    """
    return tuple(token.lower() for token in _TOKEN.findall(name))


def is_index(name: str) -> bool:
    """Whether a name is a place in a sequence, and says nothing else."""
    return _INDEX.fullmatch(name) is not None


@dataclasses.dataclass(frozen=True)
class Meaning:
    """Words of one meaning.

    Attributes:
      words: as they are.
      stems: beginnings of words.
      parts: what words contain.
    """

    words: frozenset[str]
    stems: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()

    def is_in(self, found: Iterable[str]) -> bool:
        """Whether any of the tokens means it."""
        return any(map(self._means, found))

    @functools.cached_property
    def _known(self) -> dict[str, bool]:
        """Answers so far: trees have few words, and ask for each of them often."""
        return {}

    def _means(self, token: str) -> bool:
        if token not in self._known:
            has_part = any(part in token for part in self.parts)
            self._known[token] = token in self.words or token.startswith(self.stems) or has_part
        return self._known[token]


def word_set(words: str) -> frozenset[str]:
    """Words between spaces.

    Example:
      >>> sorted(word_set("up down"))
      ['down', 'up']
    """
    return frozenset(words.split())


def _means(words: str, stems: tuple[str, ...] = (), parts: tuple[str, ...] = ()) -> Meaning:
    return Meaning(word_set(words), stems, parts)


# Tables that are looked up. Of a layer's name, unless a word of PROJECTION is there too.
EMBEDDING = _means("emb embs posemb tokemb wte wpe tok lut lookup", parts=("embed",))
TABLE = _means(
    "table tables codebook codebooks codes token tokens latent latents pos pe ape rpe rel relpos "
    "relative prototype prototypes probe probes register registers memory slot slots centroid "
    "centroids anchor anchors prompt prompts cls encoding encodings refpoint refpoints feat "
    "features",
    stems=("posit",),
)
POSITION = _means("pos wpe posemb pe ape rpe rel relpos relative", stems=("posit",))
# Layers that multiply, whatever else their names say: `pos_proj`, `token_mixing`, `rel_pos_mlp`.
PROJECTION = _means(
    "proj linear dense mlp mlps fc ffn lin gate mixing mixer net modulation einsum mix qkv "
    "adapter reduction merge merger fuse fusion expert experts",
    stems=("project", "mapp", "conv", "transform", "downsampl", "upsampl", "compress"),
    parts=("conv",),
)
# What an 'embedding' of these multiplies: pixels are numbers, not indices, and so may others be.
PIXELS = _means("patch patches pixel pixels")
INPUT = _means("x context pooled timestep image visual audio input")
ENTRY = _means("in input inputs stem first")
NORM = _means("ln lnf bn gn rms layernorm batchnorm", stems=("normaliz",), parts=("norm",))
# A linear layer that makes a norm's scale is no norm: `norm_modulation`, `to_gamma`.
CONDITION = _means("to ada adaln modulation time cond emb")
VECTOR = _means(
    "bias biases scale scales gain gamma beta offset shift mean std var log logscale logstd sink "
    "sinks temperature translate alpha decay"
)
QUANTISATION = _means("qzeros zeros zp absmax scb amax qscales qscale")
LORA = _means("loha lokr hada dora", parts=("lora",))
DEPTHWISE = _means("dw dwconv dwc depth", stems=("depthwise",), parts=("dwconv", "convdw"))
CONV = _means("conv convolution")
HEAD = _means(
    "head heads score scores pred preds predict predictor predictors prediction predictions "
    "readout",
    stems=("unembed",),
    parts=("logit", "classif"),
)
# Words of modules that end in a head, above the layer that is one.
HEAD_MODULE = _means("output outputs final last cls qa lm policy critic actor", stems=("predict",))
OUTPUT = _means(
    "out outc decoder value class vocab output outputs generator summary mean mu std logstd logvar"
)
RECONSTRUCTION = _means("decoder dec out output", stems=("recon", "decod", "generat"))
HIDDEN = _means(
    "time adaln ada patch in up down query key hidden pooler pre to merger",
    stems=("timestep",),
)
ATTENTION = _means("attn attention qkv kv wq wk wv wo", stems=("attn",), parts=("attention",))
QUERY_KEY = _means("q k query key")
OF_BLOCK = _means("out output value")  # matrices of a block that is written without a library
GATE = _means("gate gates router routers")  # multiplies what other layers give
CELL = _means("", parts=("lstm", "gru", "rnn", "cell"))


@dataclasses.dataclass(frozen=True)
class LeafName:
    """A leaf's path, read.

    Attributes:
      names: its names as they are.
      own: the leaf's own name in lower case, '' where it has none.
      layer_name: the layer's name: of the module above 'weight' or 'kernel', or the leaf's own
        where that tells itself, as `pos_embed` and `in_proj_weight` do.
      layer: its tokens, without those of a weight.
      above: tokens of the modules above the layer.
      parent: names above the layer.
      is_weight: whether the own name is, or ends with, one that frameworks give a layer's weight.
      is_numbered: whether the layer is a place in a sequence: 'classifier/0/weight'.
    """

    names: Segments
    own: str
    layer_name: str
    layer: Tokens
    above: tuple[Tokens, ...]
    parent: Segments
    is_weight: bool
    is_numbered: bool

    @property
    def is_plain(self) -> bool:
        """Whether the own name is that of a layer's weight and nothing else."""
        return self.own in _WEIGHT

    @property
    def is_kernel(self) -> bool:
        """Whether Flax, Haiku and Keras give that name to what multiplies: no table, no vector."""
        return self.own in ("kernel", "w")

    @property
    def is_bias(self) -> bool:
        """Whether it is called a bias."""
        return "bias" in self.own or self.own == "b"

    @property
    def all_tokens(self) -> Tokens:
        """Tokens of the layer and of all modules above."""
        return (*self.layer, *self.all_above)

    @property
    def all_above(self) -> Tokens:
        """Tokens of all modules above the layer."""
        return tuple(token for above in self.above for token in above)

    def near(self, count: int) -> Tokens:
        """Tokens of the layer and of so many modules above it."""
        return (*self.layer, *(token for above in self.above[-count:] for token in above))


@functools.lru_cache(maxsize=2**16)
def leaf_name(segments: Segments) -> LeafName:
    """Reads a path.

    Example:
      >>> found = leaf_name(("h", "0", "lora_A", "default", "weight"))
      >>> found.layer, found.above, found.is_weight
      (('lora', 'a'), (('h',),), True)
    """
    names = names_of(segments)
    is_boxed = names[-1:] == ("value",) and names[-2:-1] and names[-2].lower() in _BOXED
    rest, _ = _without_tail(names[:-1] if is_boxed else names)
    own = rest[-1] if rest else ""
    found = tokens(own)
    if own.lower() not in _WEIGHT:
        is_weight = len(found) > 1 and bool({found[0], found[-1]} & (_WEIGHT - {"w"}))
        layer = tuple(t for t in found if t not in _WEIGHT) if is_weight else found
        place = any(is_index(name) for name in names[len(rest) :])
        above, layer_name = rest[:-1], own
    else:
        modules, place = _without_tail(rest[:-1])
        above, layer_name = modules[:-1], modules[-1] if modules else ""
        is_weight, layer = True, tokens(layer_name)
    return LeafName(names, own.lower(), layer_name, layer, _above(above), above, is_weight, place)


def _without_tail(names: Segments) -> tuple[Segments, bool]:
    """Drops wrappers and places in sequences from the end; whether there was a place."""
    end = len(names)
    while end and (is_index(names[end - 1]) or names[end - 1].lower() in _WRAPPERS):
        end -= 1
    return names[:end], any(is_index(name) for name in names[end:])


def _above(names: Segments) -> tuple[Tokens, ...]:
    return tuple(tokens(name) for name in names if not is_index(name))
