"""What can be said of TPUs without one: the compiler is in libtpu."""

import json
import os
import subprocess
import sys

import pytest

from tests.parallel.test_mesh import ROOT


def test_an_update_compiles_for_tpu_with_splash_attention():
    pytest.importorskip("libtpu")
    environment = dict(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    done = subprocess.run(
        [sys.executable, "-m", "tests.parallel.compile_for_tpu"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["attention"] == "splash"
    # One in the forward pass and two in the backward pass, in a scan over the layers: with remat="dots" the forward
    # kernel is not run again.
    assert told["kernels"] == 3
    # Weights and both moments lie in eighths; the tiles that small arrays are padded to take the rest.
    assert told["whole"] / 8 < told["arguments"]["none"] < 1.5 * told["whole"] / 8
    # Offloaded, the moments are two thirds of it, and the weights the rest; they are updated in place there, too.
    share = {offload: told["arguments"][offload] / told["arguments"]["none"] for offload in told["arguments"]}
    assert share["state"] < 0.4 and share["all"] < 0.1
    assert told["in_host"]["none"] == 0 and told["in_host"]["all"] > 1.4 * told["in_host"]["state"] > 0
    assert told["aliased"] == told["in_host"]
