import gc
import os
from importlib.metadata import version
from pathlib import Path

gc.disable()  # until all is collected, see below

# These tests compile thousands of small programs, and XLA on CPU would spend three quarters of
# their time on making code fast. The flags leave a program's collectives and its values alone.
# Processes that tests start inherit them. The last was taken out after jaxlib 0.10, and XLA aborts
# on flags that it doesn't know.
_FLAGS = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if version("jaxlib").startswith("0.10."):
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([*_FLAGS, os.environ.get("XLA_FLAGS", "")])

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)

# Programs are kept in a folder, where the other processes of a run and later runs find them: what
# the library traces to has changed in few of them. A program's key has all that its code hangs on.
_OPTIONS = {
    "jax_compilation_cache_dir": str(Path(__file__).parents[1] / ".jax_cache"),
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_traceback_in_locations_limit": 0,  # no Python frames in programs, which take time to write
}
for name, value in _OPTIONS.items():
    jax.config.update(name, value)  # pytest has imported JAX before, for its filter of warnings
    os.environ[name.upper()] = str(value)  # for processes that tests start


def pytest_collection_finish() -> None:
    """Leaves what was imported and collected out of Python's collections, and makes these rare.

    Nearly all of it stays, and JAX makes many objects while it traces, few of them in cycles:
    collecting took a tenth of the tests' time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    gc.enable()
