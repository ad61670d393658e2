"""megatron_prism: what is installed, and the three places where it hooks in."""

import pathlib
import re

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = pathlib.Path(__file__).parent
INIT = (HERE / "megatron_prism" / "__init__.py").read_text(encoding="utf-8")
README = HERE / "README.md"

# megatron.training imports these; megatron-core does not ask for them
TRAINING = [
    "six",
    "regex",
    "psutil",  # without it a job that saves waits for ever (0.16.1, torch_dist)
    'megatron-core[training]; python_version >= "3.12"',
]
MCP = ["mcp>=2"]  # prism mcp
TEST = ["pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6.100", *TRAINING, *MCP]

RECIPES = ("*.yaml", "README.md", "data/*.txt")


class BuildWithRecipes(build_py):
    """Copy the recipes beside the code of a wheel.

    They live at the top of the checkout, where people look.  An editable install reads them there.
    """

    def _recipe_files(self) -> dict[str, str]:
        """Return the recipes: path in the wheel -> path in the checkout."""
        package = pathlib.Path(self.build_lib, "megatron_prism")
        files = {}
        for pattern in RECIPES:
            for source in sorted((HERE / "recipes").glob(pattern)):
                inside = source.relative_to(HERE)
                files[str(package / inside)] = str(inside)
        return files

    def run(self) -> None:
        """Build the packages, then copy the recipes into them."""
        super().run()
        if self.editable_mode:
            return
        for target, source in self._recipe_files().items():
            self.mkpath(str(pathlib.Path(target).parent))
            self.copy_file(source, target)

    def get_source_files(self) -> list[str]:
        """Return the files of a source archive."""
        return [*super().get_source_files(), *self._recipe_files().values()]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Return the files that a build writes."""
        return [*super().get_outputs(include_bytecode), *self._recipe_files()]

    def get_output_mapping(self) -> dict[str, str]:
        """Return the files of a build that are copies: path in the wheel -> path in the checkout.

        A strict editable install (``--config-settings editable_mode=strict``) links them.
        """
        return {**super().get_output_mapping(), **self._recipe_files()}


setup(
    name="megatron_prism",
    version=re.search(r'^__version__ = "([^"]+)"', INIT, re.MULTILINE)[1],
    description="Run any rank of a large Megatron-LM job on one machine, and see what it does",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["megatron_prism", "megatron_prism.*"]),
    # With this entry an editable install puts the checkout on sys.path (a .pth line).  Without it,
    # or with a package elsewhere, setuptools installs a finder that Python asks last: after any
    # folder named megatron_prism, as the checkout's own, which from above is a namespace package.
    package_dir={"": "."},
    cmdclass={"build_py": BuildWithRecipes},
    package_data={
        # of any package, a feature's, too: data beside its code, or in a folder of it
        "": ["*.json", "*/*.json", "*.sh", "*.cu", "*.html", "*.css", "*.js"],
        "megatron_prism.recipes": ["*.yaml", "README.md", "data/*.txt"],
    },
    # Lower bounds are what we run in CI, upper bounds the first release we have not seen;
    # constraints/ holds the exact sets.  An untested megatron-core inside the range warns by name
    # at start.
    install_requires=[
        "torch>=2.11",
        "numpy>=1.26",
        "rich>=13",
        "megatron-core>=0.16.1,<0.21",
        "numba>=0.61",  # loops over large world graphs (graph/loops.py); 55 MB
        "msgspec>=0.19",  # checks foreign files against types; 0.4 MB, no dependencies
        "PyYAML>=6",
        "einops>=0.8",  # hybrid models of Megatron import it; 0.06 MB, no dependencies
        "nvidia-ml-py>=12",  # a GPU's clock and power; 0.05 MB, no dependencies
        # its Python alone, 1.2 MB: without an extra the wheel brings no library and needs nothing.
        # It imports pydantic (common/recipe/__init__.py) and does not ask for it.
        "transformer-engine>=2.9",
        "pydantic>=2",
    ],
    extras_require={
        "test": TEST,
        "dev": [*TEST, "ruff>=0.6", "mypy>=2", "types-PyYAML"],
        "docs": ["mkdocs-material>=9.5"],
        "sweep": ["ray[client]>=2.9", "optuna>=3"],  # prism sweep address=, trials=
        "debug": ["debugpy>=1.8"],
        "mcp": MCP,
        "training": TRAINING,
        "te": ["transformer-engine[pytorch]>=2.9"],  # with its library, for a GPU
    },
    entry_points={
        "console_scripts": ["prism = megatron_prism.__main__:main"],
        # imported by `import torch`: a stock pretrain_gpt.py --prism-emulate needs no edit
        "torch.backends": ["megatron_prism = megatron_prism:_autoload"],
        "pytest11": ["megatron_prism = megatron_prism.pytest_plugin"],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
