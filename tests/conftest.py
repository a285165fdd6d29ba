"""What all tests share: the environment TensorFlow starts in, the pictures, and a check for leaks."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
import uuid

import psutil
import pytest

# Read once, when TensorFlow is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

# Every process that a test starts inherits this mark and keeps it when its parent is gone.
_SESSION_VARIABLE = "FEAST_TF_TEST_SESSION"
_SESSION = uuid.uuid4().hex
os.environ[_SESSION_VARIABLE] = _SESSION

# What needs TensorFlow Federated is not collected without it: `make test-modern` runs the rest.
if importlib.util.find_spec("tensorflow_federated") is None:
    collect_ignore = ["aggregation", "algorithms", "configs_test.py",
                      "examples/fedavg_pipeline_test.py", "examples/secure_sum_test.py", "programs",
                      "runtime", "setup_test.py", "simulation"]



def pytest_configure(config: pytest.Config) -> None:
    """Gives the runtime's tests two CPU devices, before any test module is imported.

    Devices are counted once in a process, when TensorFlow runs its first operation.
    """
    tests = Path(__file__).resolve().parent / "runtime"
    given = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    if importlib.util.find_spec("tensorflow_federated") and any(
            tests in (path, *path.parents) or path in tests.parents for path in given):
        import tensorflow as tf

        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * 2)


_WORKER_NAME = "worker_binary"
_SECONDS_TO_END = 5


def _workers_of_this_session() -> list[psutil.Process]:
    workers = []
    for process in psutil.process_iter(["name"]):
        try:
            if process.info["name"] == _WORKER_NAME:
                if process.environ().get(_SESSION_VARIABLE) == _SESSION:
                    workers.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # Ended meanwhile, or another user's: not one of ours.
    return workers


@pytest.fixture(scope="session", autouse=True)
def no_worker_survives():
    """Fails the session, after its last test, if a TensorFlow Federated worker is still running."""
    yield
    _, alive = psutil.wait_procs(_workers_of_this_session(), timeout=_SECONDS_TO_END)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=_SECONDS_TO_END)
    assert not alive, f"the tests left {_WORKER_NAME} processes running: {alive}"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with archives of real pictures; tests that need it are skipped without it."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("FEAST_TF_SHARED_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"no pictures in {folder}; set FEAST_TF_SHARED_DATA to their folder")
    return folder


@pytest.fixture(scope="session")
def trained_centrally():
    """(cache, data set, batches, augmentation, rate) -> a `SavedSupernet` that one client trained.

    The client has all batches, and is of the highest level.
    """
    import tensorflow as tf

    from feast_tf import serving, space, supernet, training

    def train(cache, data, batches, *, augmentation, rate):
        layout, mean, std = space.layout_of(cache.spec), tuple(data.mean), tuple(data.std)
        local = training.LocalTraining(mean=mean, std=std, augmentation=augmentation)
        initial = [tf.constant(weight) for weight in supernet.initial_weights(layout, 0)]
        result = tf.function(lambda: training.local_update(
            layout, local, tf.constant(cache.dims), initial, tf.constant(len(cache) - 1), batches,
            tf.constant([1, 2]), tf.constant(rate)))()
        weights = tuple((old + update).numpy() for old, update in zip(initial, result.update))
        return serving.SavedSupernet(cache, weights, data.classes, mean, std)

    return train


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory, trained_centrally) -> Path:
    """The folder of a finished run, which one client with all digits trained; it stays as it is.

    Its cache has 162976, 429296, 724208 and 890096 MACs and 3602, 13330, 18002 and 28466
    parameters.
    """
    import json

    import tensorflow as tf

    from configs import digits
    from feast_tf import datasets, serving, space, training

    fields = dict(stem=8, bases=(16, 24), depths=(0, 1), widths=(0.5, 1.0), expansions=(0.5, 1.0),
                  strides=(2, 2), divisor=8)
    data = datasets.load("digits", image_size=16, held_out=0.2, server_samples=160, seed=0)
    spec = space.SupernetSpec(classes=10, image_size=16, **fields)
    cache = space.VariantCache(spec, [
        spec.variant(d=0, e=0.5, w=0.5), spec.variant(d=0, e=1.0, w=1.0),
        spec.variant(d=(1, 0), e=1.0, w=1.0), spec.variant(d=1, e=1.0, w=1.0)])
    pictures = tf.data.Dataset.from_tensor_slices({"x": data.train.images, "y": data.train.labels})
    saved = trained_centrally(
        cache, data, pictures.shuffle(2000, seed=1).repeat(6).batch(32), rate=0.1,
        augmentation=training.Augmentation(crop_padding=0, flip=False, randaugment_layers=0,
                                           mixup_alpha=0.0, cutmix_alpha=0.0))

    folder = tmp_path_factory.mktemp("trained") / "run"
    serving.save_supernet(folder / "model", saved)
    config = digits.get_config()
    config.space.update(fields)
    config.population.budgets = "2e5:20,9e5:10"
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    (folder / "summary.json").write_text(json.dumps({"rounds": 60, "best_round": 50}))
    return folder
