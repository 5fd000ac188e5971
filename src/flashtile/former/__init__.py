"""The former names of the laboratory's packages, for one release: `flashtile.bench` for `flashtile.lab.bench`.

This folder is the second one that `import flashtile.<name>` looks into: `flashtile/__init__.py` adds it to the path of
the package. Each module here stands for a package.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import warnings


def moved(name: str) -> None:
    """Puts the package that `name` was, with its modules, in place of the module `name`, which calls this. Both names
    give the same modules."""
    new_name = name.replace("flashtile.", "flashtile.lab.", 1)
    text = f"{name} is now {new_name}. The former name will go with the next release."
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    package = importlib.import_module(new_name)
    for module in pkgutil.iter_modules(package.__path__):
        sys.modules[f"{name}.{module.name}"] = importlib.import_module(f"{new_name}.{module.name}")
    sys.modules[name] = package
