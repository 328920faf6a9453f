"""``cwy.jax`` stands apart: it does not load torch, and nothing else loads JAX."""

import subprocess
import sys


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_torch_is_not_imported():
    code = (
        "import sys, cwy.jax, jax, numpy\n"
        "cwy.jax.cwy_matrix(numpy.eye(3, 2))\n"
        "assert jax.__name__ == 'jax' and cwy.jax is not jax\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] == 'torch']"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_the_library_does_not_import_jax():
    code = (
        "import sys, cwy\n"
        "for name in cwy.__all__: getattr(cwy, name)\n"
        "import cwy.cli, cwy.bench\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] == 'jax']"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_without_jax_the_error_names_what_to_install():
    done = run("import sys; sys.modules['jax'] = None\nimport cwy\nimport cwy.jax")
    assert done.returncode == 1
    assert 'pip install "cwy[jax]"' in done.stderr.splitlines()[-1]
