"""Whether the kernels in C++ can be built here."""

import shutil

import pytest

HAS_COMPILER = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler (c++, g++, clang++) is installed")
