"""The folder `analysis` beside this package in a checkout, under the name that it has in a wheel.

Its modules import each other as `analysis`. They are found by their place: a folder of the user's may have that name.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_HOME = Path(__file__).parents[1] / "analysis"
_SPEC = spec_from_file_location("analysis", _HOME / "__init__.py", submodule_search_locations=[str(_HOME)])
if _SPEC is None or _SPEC.loader is None or not _HOME.is_dir():
    raise ImportError(f"there is no folder {_HOME}")
if getattr(sys.modules.get("analysis"), "__file__", None) != _SPEC.origin:
    sys.modules["analysis"] = module_from_spec(_SPEC)
    _SPEC.loader.exec_module(sys.modules["analysis"])
sys.modules[__name__] = sys.modules["analysis"]
