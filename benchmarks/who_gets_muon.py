"""Who gets Muon in every model of transformers, timm, torchvision and diffusers, by their modules.

Models are built on PyTorch's meta device, from their default configurations, without weights. What
each leaf should get is read from its module: AdamW for `nn.Embedding`, for output embeddings and
for classifiers, Muon for every other `nn.Linear`. So last layers of other kinds (of boxes, of
scores, of reconstructed data) count as hidden here, and as lost where they get AdamW.

    pip install torch==2.13.0 transformers timm torchvision diffusers
    python benchmarks/who_gets_muon.py transformers timm
"""

import argparse
import collections
import contextlib
import inspect
import re
import signal
import warnings
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import torch

from muon_optax import report

Make = Callable[[], torch.nn.Module]
TABLE = re.compile(r"embed|token|table|latent|pos|bias|query|codebook|scale|A_log")
FIELDS = ("models", "adam", "adam_on_muon", "hidden", "hidden_on_muon", "hidden_warned_of")


def transformers_models() -> Iterator[tuple[str, Make]]:
    """The architectures of all automatic classes."""
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    transformers.logging.set_verbosity_error()
    maps = [x for n, x in vars(modeling_auto).items() if re.fullmatch(r"MODEL_.*MAPPING", n)]
    found: dict[str, str] = {}
    for mapping in maps:
        for config, names in mapping._model_mapping.items():
            found.setdefault(names if isinstance(names, str) else names[0], config)
    for name, config in found.items():
        yield name, lambda n=name, c=config: getattr(transformers, n)(CONFIG_MAPPING[c]())


def timm_models() -> Iterator[tuple[str, Make]]:
    """Up to four models of each family."""
    import timm

    families: dict[str, list[str]] = collections.defaultdict(list)
    for name in timm.list_models():
        families[timm.models.model_entrypoint(name).__module__].append(name)
    for names in families.values():
        for name in names[:: max(1, len(names) // 4)][:4]:
            yield name, lambda n=name: timm.create_model(n)


def torchvision_models() -> Iterator[tuple[str, Make]]:
    """All classification models."""
    import torchvision

    for name in torchvision.models.list_models(torchvision.models):
        yield name, lambda n=name: torchvision.models.get_model(n, weights=None)


def diffusers_models() -> Iterator[tuple[str, Make]]:
    """All models."""
    import diffusers

    for name in sorted(dir(diffusers)):
        kind = getattr(diffusers, name, None)
        if inspect.isclass(kind) and issubclass(kind, diffusers.ModelMixin):
            yield name, kind


LIBRARIES = {
    "transformers": transformers_models,
    "timm": timm_models,
    "torchvision": torchvision_models,
    "diffusers": diffusers_models,
}


def heads_of(model: torch.nn.Module) -> set[str]:
    """Names of the modules that a library itself calls the head, or that give its classes."""
    named = {id(module): name for name, module in model.named_modules()}
    found = set()
    for getter in ("get_output_embeddings", "get_classifier"):
        with contextlib.suppress(Exception):
            found.add(named[id(getattr(model, getter)())])
    config = getattr(model, "config", None)
    classes = getattr(config, "num_labels", 1000) if config is not None else 1000
    base = f"{getattr(model, 'base_model_prefix', '')}."
    for name, module in model.named_modules():
        is_linear = isinstance(module, torch.nn.Linear) and module.out_features == classes
        if is_linear and (config is None or not name.startswith(base)):
            found.add(name)
    return found


def wanted(model: torch.nn.Module) -> dict[str, tuple[tuple[int, ...], str | None]]:
    """Shape, and 'adam' or 'muon', of each parameter; None where the module doesn't tell."""
    heads = heads_of(model)
    found = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            path, shape = f"{module_name}.{name}".lstrip("."), tuple(parameter.shape)
            is_head = any(module_name == h or module_name.startswith(f"{h}.") for h in heads)
            want = None
            if len(shape) < 2 or isinstance(module, torch.nn.Embedding) or is_head:
                want = "adam"
            elif len(shape) == 2 and isinstance(module, torch.nn.Linear):
                want = "muon"
            elif len(shape) == 2 and TABLE.search(name) and not name.endswith("weight"):
                want = "adam"
            found[path] = (shape, want)
    return found


def count(make: Make) -> collections.Counter[str]:
    """Figures of one model, layers that are alike counted once."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        leaves = wanted(make())
    params = {p: jax.ShapeDtypeStruct(s, jnp.float32) for p, (s, _) in leaves.items()}
    made = report(params)
    doubts = " ".join(text for text in made.warnings if "Rule(" in text)
    figures, seen = collections.Counter(models=1), set()
    for row in made.rows:
        kind = re.sub(r"\d+", "*", row.path), row.shape
        want = leaves[row.path][1]
        if want is None or kind in seen:
            continue
        seen.add(kind)
        is_muon, is_told = row.optimizer == "muon", f"{row.path} {row.shape}" in doubts
        if want == "adam":
            figures.update(adam=1, adam_on_muon=int(is_muon and not is_told))
        else:
            figures.update(hidden=1, hidden_on_muon=int(is_muon), hidden_warned_of=int(is_told))
    return figures


def main() -> None:
    """Prints the figures of each library."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("libraries", nargs="*", default=list(LIBRARIES), choices=LIBRARIES)
    parser.add_argument("--seconds", type=int, default=60, help="for one model, at most")
    args = parser.parse_args()
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError()))
    print("library", *FIELDS, "not_built")
    for library in args.libraries:
        total, failed = collections.Counter(), 0
        for _, make in LIBRARIES[library]():
            signal.alarm(args.seconds)
            try:
                total += count(make)
            except Exception:  # needs another library, arguments, or too long
                failed += 1
            finally:
                signal.alarm(0)
        version = __import__(library).__version__
        print(f"{library} {version}", *(total[f] for f in FIELDS), failed, flush=True)


if __name__ == "__main__":
    main()
