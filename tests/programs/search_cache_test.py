"""Tests of tff_programs.search_cache, as a user runs it."""

import json
import os
from pathlib import Path
import subprocess
import sys
import time

import numpy as np
import pytest

from feast_tf.space import SupernetSpec
from feast_tf.space import VariantCache
from feast_tf.space import paper_spec
from feast_tf.space import shipped_cache

ROOT = Path(__file__).resolve().parents[2]
SPACE = dict(stem=16, bases=[16, 32], depths=[0, 1, 2], widths=[0.5, 1.0], expansions=[0.25, 0.5],
             strides=[1, 2], classes=10, image_size=16)


def search(folder, *flags):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-m", "tff_programs.search_cache", *flags], cwd=folder,
                          env=environment, capture_output=True, text=True, timeout=120)


def test_the_paper_space_in_a_minute(tmp_path):
    pins = ["--pin=d=3,7,6,7 e=0.1 w=0.3,0.1,0.1,0.1,0.1",
            "--pin=d=8 e=0.1,0.25,0.1,0.18 w=0.6,0.3,0.6,0.8,0.5"]
    start = time.monotonic()
    result = search(tmp_path, *pins)
    assert time.monotonic() - start < 60
    assert result.returncode == 0, result.stderr
    cache = VariantCache.load(tmp_path / "variants.csv", paper_spec())
    shipped = shipped_cache("paper_56", paper_spec())
    assert len(cache) == 56 and "variants: 56, targets: 56, file: variants.csv" in result.stdout
    # The shipped cache, up to multipliers that round to the same channels (0.3 and 0.4 of a stem).
    np.testing.assert_array_equal(cache.dims, shipped.dims)
    before = (tmp_path / "variants.csv").read_bytes()
    assert search(tmp_path, *pins).returncode == 0
    assert (tmp_path / "variants.csv").read_bytes() == before


def test_a_configuration_a_file_and_blocks(tmp_path):
    assert search(tmp_path, f"--spec={ROOT / 'configs' / 'digits.py'}", "--targets=0.7e6:4.5e6:5",
                  "--output=digits.csv").returncode == 0
    (tmp_path / "space.json").write_text(json.dumps(SPACE))
    result = search(tmp_path, "--spec=space.json", "--constraint=params", "--targets=5e3,9e3,1e4",
                    "--output=small.csv")
    assert result.returncode == 0, result.stderr
    assert max(VariantCache.load(tmp_path / "small.csv", SupernetSpec(**SPACE)).params) <= 1e4
    result = search(tmp_path, "--spec=space.json", "--expansion=block", "--targets=1e6",
                    "--output=block.csv")
    assert result.returncode == 0 and "variants: 1, targets: 1" in result.stdout
    assert (tmp_path / "block.fitness.csv").exists() and not (tmp_path / "block.csv").exists()


def test_measured_latency(tmp_path):
    (tmp_path / "space.json").write_text(json.dumps(SPACE))
    (tmp_path / "stopwatch.py").write_text("blocks = lambda spec, variant: sum(variant.d)")
    result = search(tmp_path, "--spec=space.json", "--constraint=latency", "--targets=0.5,2,4",
                    "--measure=stopwatch:blocks", "--candidates=20")
    assert result.returncode == 0, result.stderr
    cache = VariantCache.load(tmp_path / "variants.csv", SupernetSpec(**SPACE))
    assert [sum(variant.d) for variant in cache.variants] == sorted(
        sum(variant.d) for variant in cache.variants)
    assert max(sum(variant.d) for variant in cache.variants) <= 4


@pytest.mark.parametrize("flags, message", [
    (["--targets=9,8"], "targets '9,8' must be low:high:count"),
    (["--targets=1000"], "no network keeps the targets: the cheapest of the space costs 3,803,296"),
    (["--pin=d=9"], "pin 'd=9' must look like"),
    (["--dataset=cifar10"], "--config and --dataset are not read here: name the space with --spec"),
    (["--spec=none.py"], "--spec: there is no file 'none.py'"),
    (["--spec=none.json"], "No such file or directory: 'none.json'"),
    (["--spec=bad.json"], "bad.json: "),
    (["--constraint=latency"], "--constraint=latency needs --measure=module:function"),
    (["--constraint=latency", "--measure=math:f"], "--measure: module math has no function f"),
    (["--constraint=latency", "--measure=none:f"], "No module named 'none'"),
])
def test_mistakes_end_in_one_line(tmp_path, flags, message):
    (tmp_path / "bad.json").write_text('{"stems": 3}')
    result = search(tmp_path, *flags)
    assert result.returncode == 1 and message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["bad.json"]
