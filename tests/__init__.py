"""The tests; one folder for each part, `e2e` for all of them together.

What tests import of memmgr is interpreted, as some of them put a bug into it to see that it is found; the processes that they
start are compiled, as users' are. KILBURN_TEST_COMPILED=1 is for tests/memmgr/test_memmgr_compiled.py.
"""

import os
from importlib import import_module
from typing import Final

_INTERPRETED: Final = "KILBURN_INTERPRETED"

if not os.environ.get("KILBURN_TEST_COMPILED") and _INTERPRETED not in os.environ:
    os.environ[_INTERPRETED] = "1"
    import_module("memmgr")  # which looks at the variable once
    del os.environ[_INTERPRETED]
