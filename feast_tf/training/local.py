"""One client's local work: min / random / max co-training with in-place distillation (paper 3.4).

TensorFlow only. Weights are tensors of a client's envelope, not variables, so that one traced graph
serves envelopes of every size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from feast_tf.seeding import stateless_seed
from feast_tf.space import Layout
from feast_tf.supernet import forward
from feast_tf.training import augment, losses, mixing, rules
from feast_tf.training.optimizer import SGD

# Columns of the training metrics: sums over the pictures that a role's variants were trained on.
STATISTICS = ("supervised_loss", "distillation_loss", "correct", "examples")
NORMALISATIONS = ("sum", "mean")


@dataclasses.dataclass(frozen=True)
class LocalTraining:
    """What a client does with a mini-batch.

    Attributes:
      rule: a name in `rules.RULES` (the rows of the paper's Table 2).
      optimizer: local `SGD`.
      rho_kd: share of the distillation loss in a student's loss.
      temperature: of the distillation (the paper's formula has none: 1).
      label_smoothing: of the supervised loss.
      gradients: "sum" of the variants' gradients, or their "mean".
      augmentation: an `augment.Augmentation`.
      mean, std: per-channel normalisation of pictures scaled to 0..1.
    """

    rule: str = "full"
    optimizer: SGD = SGD()
    rho_kd: float = 0.5
    temperature: float = 1.0
    label_smoothing: float = 0.0
    gradients: str = "sum"
    augmentation: augment.Augmentation = augment.Augmentation()
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.25, 0.25, 0.25)

    def __post_init__(self):
        if self.rule not in rules.RULES:
            raise ValueError(f"rule must be one of {', '.join(rules.RULES)}, but is {self.rule!r}")
        if not 0 <= self.rho_kd <= 1:
            raise ValueError(f"rho_kd must lie in [0, 1], but is {self.rho_kd}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and positive, but is {self.temperature}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must lie in [0, 1), but is {self.label_smoothing}")
        if self.gradients not in NORMALISATIONS:
            raise ValueError(f"gradients must be one of {', '.join(NORMALISATIONS)}, but is "
                             f"{self.gradients!r}")


class LocalResult(NamedTuple):
    """What local training yields.

    Attributes:
      update: tuple of float32 tensors, trained minus received weights.
      num_examples: int32 scalar n_i, pictures that were trained on.
      metrics: float32[len(ROLES), len(STATISTICS)] sums.
    """

    update: tuple[tf.Tensor, ...]
    num_examples: tf.Tensor
    metrics: tf.Tensor


def local_seed(seed: int, round_num: tf.Tensor, client: tf.Tensor) -> tf.Tensor:
    """The int32[2] seed of all that a client (int32 scalar) draws in a round (int32 scalar)."""
    state = tf.constant(stateless_seed(seed, "local training"))
    for part in (round_num, client):
        state = tf.random.experimental.stateless_fold_in(state, part)
    return state


def flatten(weights: Sequence[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """(float32 vector of all weights, int32[parameters] of their sizes)."""
    vector = tf.concat([tf.reshape(weight, [-1]) for weight in weights], axis=0)
    return vector, tf.stack([tf.size(weight) for weight in weights])


def unflatten(layout: Layout, vector: tf.Tensor, sizes: tf.Tensor, shapes: Sequence[tf.Tensor]
              ) -> tuple[tf.Tensor, ...]:
    """The weights in a vector that `flatten` made, of the given (dynamic) shapes."""
    parts = tf.split(vector, sizes, num=len(shapes))
    return tuple(tf.ensure_shape(tf.reshape(part, shape), parameter.elastic_shape)
                 for parameter, part, shape in zip(layout.parameters, parts, shapes))


def prepare_batch(config: LocalTraining, images: tf.Tensor, labels: tf.Tensor, seed: tf.Tensor,
                  step: tf.Tensor) -> mixing.MixedBatch:
    """Augments, normalises and mixes uint8 pictures; `seed` is the mini-batch's int32[2]."""
    seeds = tf.random.experimental.stateless_split(seed, 2)
    images = augment.augment_images(images, seed=seeds[0], config=config.augmentation)
    images = augment.normalize(images, mean=config.mean, std=config.std)
    return mixing.mix(images, labels, seed=seeds[1], step=step, config=config.augmentation)


def cotrain_gradient(layout: Layout, config: LocalTraining, vector: tf.Tensor,
                     as_weights: Callable[[tf.Tensor], Sequence[tf.Tensor]],
                     variant_dims: tf.Tensor, roles: tf.Tensor, batch: mixing.MixedBatch, *,
                     network: Callable[..., tf.Tensor] = forward) -> tuple[tf.Tensor, tf.Tensor]:
    """The gradient of all variants of one mini-batch.

    The variants run one after the other in one loop, so the graph holds a single forward and
    backward pass, and memory the activations of a single variant. The first variant is the teacher;
    its targets are carried to the students.

    Args:
      layout: the supernet's layout.
      config: the local training.
      vector: float32[P], the weights of an envelope that contains every variant, as one vector.
      as_weights: from the vector to a tensor for each parameter.
      variant_dims: int32[V, 1 + 3S], the largest variant first.
      roles: int32[V], indices into `rules.ROLES`.
      batch: the pictures.
      network: runs a variant; takes and returns what `supernet.forward` does.

    Returns:
      (gradient, metrics): float32[P], and float32[ROLES, STATISTICS] sums.
    """
    rule = rules.RULES[config.rule]
    rho = config.rho_kd if rule.distill else 0.0
    size = tf.cast(tf.shape(batch.labels_a)[0], tf.float32)

    def variant_step(index, targets, gradient, metrics):
        is_teacher = tf.equal(index, 0)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(vector)
            logits = network(layout, as_weights(vector), variant_dims[index], batch.images)
            supervised = losses.supervised_loss(logits, batch.labels_a, batch.labels_b, batch.lam,
                                                config.label_smoothing)
            distillation = losses.distillation_loss(logits, targets, config.temperature)
            share = tf.where(is_teacher, 0.0, rho)
            loss = (1.0 - share) * supervised + share * distillation
        gradient += tape.gradient(loss, vector)
        targets = tf.where(is_teacher, losses.soft_targets(logits, config.temperature), targets)
        guess = tf.argmax(logits, axis=-1, output_type=tf.int32)
        # tf.equal: inside a TFF computation `==` on tensors compares identities.
        hits = lambda labels: tf.reduce_sum(tf.cast(tf.equal(guess, labels), tf.float32))
        correct = batch.lam * hits(batch.labels_a) + (1.0 - batch.lam) * hits(batch.labels_b)
        row = tf.stack([supervised * size, distillation * size, correct, size])
        metrics += tf.one_hot(roles[index], len(rules.ROLES))[:, tf.newaxis] * row
        return index + 1, targets, gradient, metrics

    # Zeros, but no constant of them: a TensorFlow Lite file would hold it next to the weights.
    nothing = 0.0 * vector
    # No targets for the first variant: its distillation loss is 0.
    targets = tf.zeros([tf.shape(batch.labels_a)[0], layout.spec.classes])
    metrics = tf.zeros([len(rules.ROLES), len(STATISTICS)])
    _, _, gradient, metrics = tf.while_loop(
        lambda index, *_: index < tf.shape(variant_dims)[0], variant_step,
        (tf.constant(0), targets, nothing, metrics), parallel_iterations=1)
    if config.gradients == "mean":
        gradient /= tf.cast(tf.shape(variant_dims)[0], tf.float32)
    return gradient, metrics


def local_update(layout: Layout, config: LocalTraining, cache_dims: tf.Tensor,
                 weights: Sequence[tf.Tensor], level: tf.Tensor, dataset: tf.data.Dataset,
                 seed: tf.Tensor, rate: tf.Tensor) -> LocalResult:
    """Trains a client's envelope on its pictures; call it in a `tf.function`.

    Args:
      layout: the supernet's layout.
      config: the local training.
      cache_dims: int32[A, 1 + 3S], all cached variants.
      weights: the received tensors of the client's envelope.
      level: int32 scalar, place of its largest affordable variant.
      dataset: of mappings with "x" uint8[batch, height, width, 3] and "y" int32[batch].
      seed: int32[2], of this client in this round.
      rate: float32 scalar learning rate.

    Returns:
      A `LocalResult`; all zero where the data set is empty.
    """
    # Converted here: in a `tf.function` whose source AutoGraph cannot find (a lambda of an
    # interactive session, a file that was edited meanwhile) the loop would never end.
    train = tf.autograph.to_graph(_train)
    return train(layout, config, cache_dims, weights, level, dataset, seed, rate)


def _train(layout, config, cache_dims, weights, level, dataset, seed, rate) -> LocalResult:
    rule = rules.RULES[config.rule]
    # One vector inside the loop: a hundred tensors to clip, decay and carry from step to step cost
    # as much as the training of a small variant.
    shapes = [tf.shape(weight) for weight in weights]
    initial, sizes = flatten(weights)
    as_weights = lambda vector: unflatten(layout, vector, sizes, shapes)
    vector, velocity = initial, tf.zeros_like(initial)
    metrics = tf.zeros([len(rules.ROLES), len(STATISTICS)])
    step, num_examples = tf.constant(0), tf.constant(0)
    # `for ... in iter(...)`: Dataset.reduce would instantiate the loop's body anew in every call.
    for batch in iter(dataset):
        tf.autograph.experimental.set_loop_options(parallel_iterations=1)
        seeds = tf.random.experimental.stateless_split(
            tf.random.experimental.stateless_fold_in(seed, step), 2)
        places, roles = rules.draw_variants(rule, level, seeds[0])
        prepared = prepare_batch(config, batch["x"], batch["y"], seeds[1], step)
        gradient, sums = cotrain_gradient(layout, config, vector, as_weights,
                                          tf.gather(cache_dims, places), roles, prepared)
        vector, velocity = config.optimizer.apply(gradient, vector, velocity, rate)
        metrics += sums
        num_examples += tf.shape(batch["y"])[0]
        step += 1
    return LocalResult(as_weights(vector - initial), num_examples, metrics)
