"""Set the environment of every test process before anything can import torch.

torch's OpenMP threads busy-wait. With two threads per process and two processes on two cores, training
runs some fifty times slower than with one thread each, and tests look hung. The variables are read once,
when torch is imported, so they are set here, at the top of the first file that pytest loads; processes
that a test starts inherit them.
"""

import os
import sys

assert "torch" not in sys.modules, "torch was imported before tests/conftest.py: thread limits come too late"

os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    OPENBLAS_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",  # no test may depend on a download
    GIT_PYTHON_REFRESH="quiet",  # mlflow imports GitPython, which complains where git is missing
)

from hypothesis import settings  # noqa: E402 - hypothesis must not come before the lines above

# No deadline: a machine shared by several processes makes single examples slow without being wrong.
# In CI the examples are the same each time; elsewhere hypothesis goes on looking for new ones.
settings.register_profile("treeward", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("treeward")
