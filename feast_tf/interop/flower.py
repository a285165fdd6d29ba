"""FEAST in Flower: a strategy that routes and merges slices, and the client that trains them.

Written for the message API (`flwr.serverapp`, `flwr.clientapp`) that Flower's documentation
recommends and its 1.42 release calls by default; needs the package `flwr`.

    client_app = feast_client(routing, training, budget=..., data=...)

    @server_app.main()
    def main(grid, context):
        strategy = FeastStrategy(routing.slices, total_rounds=60, min_available_nodes=4)
        result = strategy.start(grid, ArrayRecord(weights), num_rounds=60, timeout=600)

Before a node trains for the first time it is asked for its level, with a "query.level" message. It
is then sent its level's slice alone. Clients that fail, do not answer in time, or return what
cannot be used leave the round's mean as if they had not been drawn, and are counted in the round's
metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
import logging
import math
from typing import Any, Optional

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType
from flwr.app import MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
import numpy as np

from feast_tf.datasets import Split
from feast_tf.interop.rounds import Merger
from feast_tf.interop.trainer import LocalTrainer
from feast_tf.routing import Routing, SliceMap
from feast_tf.training import LocalTraining

# Names of the records in messages and of what they hold. Flower's own are those of its FedAvg.
_ARRAYS, _CONFIG, _METRICS = "arrays", "config", "metrics"
_EXAMPLES, _ROUND = "num-examples", "server-round"
_LEVEL, _TOTAL_ROUNDS, _SEED = "level", "total-rounds", "seed"

_log = logging.getLogger("flwr")


class FeastStrategy(FedAvg):
    """Federated training of one elastic model; each node holds the slice of its level (paper 3.3).

    Nodes answer "query.level" messages with a metric "level" and train messages with updates
    (trained minus received arrays) and the number of their examples, as `feast_client` does.

    Evaluation on nodes is off by default: batch normalisation takes the moments of an operating
    point from pictures that the server holds, so accuracies belong into `evaluate_fn` of `start`
    (see `feast_tf.serving.Evaluator`). With `fraction_evaluate` nodes are sent the slices of their
    levels.

    The metrics of each round: of the clients "clients-with-data", "-without-data", "-refused"
    (their result cannot be used), "-failed" (an error instead of a result), "-missing" (no answer
    in time) and "-without-level" (drawn, but not sent anything); "num-examples", "bytes-down",
    "bytes-up"; and the means, weighted by examples, of what all clients in the mean report.
    """

    def __init__(self, slices: SliceMap, *, total_rounds: int, seed: int = 0,
                 query_timeout: float = 600.0, fraction_evaluate: float = 0.0, **sampling: Any):
        """Args:
          slices: what each level holds; `Routing.slices` for the elastic ResNet.
          total_rounds: length of the learning rate's schedule, sent to the nodes.
          seed: of the nodes' randomness, sent to them.
          query_timeout: seconds to wait for the levels of nodes drawn for the first time.
          fraction_evaluate, **sampling: arguments of flwr's FedAvg, such as `fraction_train`.
        """
        super().__init__(fraction_evaluate=fraction_evaluate, weighted_by_key=_EXAMPLES,
                         arrayrecord_key=_ARRAYS, configrecord_key=_CONFIG, **sampling)
        if total_rounds < 1:
            raise ValueError(f"total_rounds must be at least 1, but is {total_rounds}")
        self.slices = slices
        self._run = {_TOTAL_ROUNDS: total_rounds, _SEED: seed}
        self._query_timeout = query_timeout
        self._levels: dict[int, int] = {}  # of nodes that have told theirs
        self._arrays = ArrayRecord()       # of the round that is under way
        self._cohort: dict[int, int] = {}  # its nodes, and their levels
        self._without_level = 0

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord,
                        grid: Grid) -> Iterable[Message]:
        """A train message for each drawn node, with the slice of its level."""
        drawn = list(super().configure_train(server_round, arrays, config, grid))
        messages = self._with_slices(drawn, arrays, grid)
        self._arrays = arrays
        self._cohort = {message.metadata.dst_node_id: message.content[_CONFIG][_LEVEL]
                        for message in messages}
        self._without_level = len(drawn) - len(messages)
        return messages

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord,
                           grid: Grid) -> Iterable[Message]:
        """An evaluate message for each drawn node, with the slice of its level."""
        drawn = super().configure_evaluate(server_round, arrays, config, grid)
        return self._with_slices(list(drawn), arrays, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]
                        ) -> tuple[Optional[ArrayRecord], Optional[MetricRecord]]:
        """The new model, of all replies that can be used."""
        counts = {"clients-without-level": self._without_level}
        if not self._cohort:
            return None, MetricRecord(counts)
        merger = Merger(self.slices, self._arrays.to_numpy_ndarrays(), self._cohort,
                        returns="updates", strict=False)
        failed, reports = {}, []
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                # A SuperLink that lost a node says so itself, and does not name it: it is missing.
                if node in self._cohort:
                    failed[node] = reply.error.reason
            elif merger.add(node, *_result(reply.content)):
                reports.append(reply.content)
        weights, summary = merger.result()
        missing = [node for node in summary["missing"] if node not in failed]
        for kind, reasons in (("failed", failed), ("refused", summary["refused"]),
                              ("missing", dict.fromkeys(missing, "no reply in time"))):
            counts[f"clients-{kind}"] = len(reasons)
            for node, reason in reasons.items():
                _log.warning("round %d: node %d %s: %s", server_round, node, kind, reason)
        counts.update({
            "clients-with-data": len(summary["with_data"]),
            "clients-without-data": len(summary["without_data"]), _EXAMPLES: summary["examples"],
            "bytes-down": summary["bytes_down"], "bytes-up": summary["bytes_up"]})
        new = ArrayRecord({key: Array(weight) for key, weight in zip(self._arrays, weights)})
        return new, MetricRecord({**_means(reports), **counts})

    def _with_slices(self, drawn: list[Message], arrays: ArrayRecord, grid: Grid) -> list[Message]:
        """The messages for nodes whose levels are known, with slices in place of whole arrays."""
        self._ask_for_levels([message.metadata.dst_node_id for message in drawn], grid)
        drawn = [message for message in drawn if message.metadata.dst_node_id in self._levels]
        levels = {self._levels[message.metadata.dst_node_id] for message in drawn}
        weights = arrays.to_numpy_ndarrays()
        parts = {level: ArrayRecord(self.slices.cut(weights, level)) for level in levels}
        for message in drawn:
            level = self._levels[message.metadata.dst_node_id]
            config = ConfigRecord({**message.content[_CONFIG], **self._run, _LEVEL: level})
            message.content = RecordDict({_ARRAYS: parts[level], _CONFIG: config})
        return drawn

    def _ask_for_levels(self, nodes: list[int], grid: Grid) -> None:
        """Notes the levels of nodes that have not told theirs; asks again in the next round."""
        queries = [Message(RecordDict(), message_type=f"{MessageType.QUERY}.{_LEVEL}",
                           dst_node_id=node)
                   for node in nodes if node not in self._levels]
        if not queries:
            return
        for reply in grid.send_and_receive(queries, timeout=self._query_timeout):
            node = reply.metadata.src_node_id
            if reply.has_error():
                _log.warning("node %d has no level: %s", node, reply.error.reason)
                continue
            level = _number(reply.content, _LEVEL)
            if isinstance(level, int) and 0 <= level < self.slices.num_levels:
                self._levels[node] = level
            else:
                _log.warning("node %d has no level: it must be an int in 0..%d, but is %r", node,
                             self.slices.num_levels - 1, level)


def feast_client(routing: Routing, training: LocalTraining, *, budget: Callable[[Context], float],
                 data: Callable[[Context], Split], batch_size: int = 32, local_epochs: int = 1
                 ) -> ClientApp:
    """The client of `FeastStrategy` for the elastic ResNet.

    Each node's configuration must give its number as `partition-id`, as Flower's simulation does:
    it tells the random draws of nodes apart.

    Args:
      routing: of the federation's variant cache, the same as the server's.
      training: what is done with a mini-batch.
      budget: the MACs that a node affords, of its context, say `context.node_config["budget"]`.
      data: a node's pictures, of its context.
      batch_size, local_epochs: how the pictures are dealt out.

    Returns:
      A `ClientApp` that answers query and train messages. What goes wrong in it, such as a budget
      that affords no variant, reaches the server as an error.
    """
    app = ClientApp()
    trainer = LocalTrainer(routing, training, batch_size=batch_size, local_epochs=local_epochs)

    @app.query(_LEVEL)
    def query(message: Message, context: Context) -> Message:
        level = routing.cache.level(budget(context))
        return Message(RecordDict({_METRICS: MetricRecord({_LEVEL: level})}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        config = message.content[_CONFIG]
        result = trainer.train(
            message.content[_ARRAYS].to_numpy_ndarrays(), data(context),
            client=int(context.node_config["partition-id"]), level=config[_LEVEL],
            round_num=config[_ROUND] - 1, total_rounds=config[_TOTAL_ROUNDS], seed=config[_SEED])
        metrics = MetricRecord({**result.metrics, _EXAMPLES: result.num_examples})
        return Message(RecordDict({_ARRAYS: ArrayRecord(result.update), _METRICS: metrics}),
                       reply_to=message)

    return app


def _number(content: RecordDict, key: str) -> Any:
    """What a reply's metrics hold under a key, None where they do not."""
    return next((record[key] for record in content.metric_records.values() if key in record), None)


def _result(content: RecordDict) -> tuple[list[np.ndarray], Any]:
    """(arrays, number of examples) of a reply, as it claims; `Merger.add` judges them."""
    arrays = []
    for record in content.array_records.values():
        for array in record.values():
            try:
                arrays.append(array.numpy())
            except (EOFError, TypeError, ValueError):  # bytes that are no array
                arrays.append(None)
    return arrays, _number(content, _EXAMPLES)


def _means(reports: list[RecordDict]) -> dict[str, float]:
    """Means, weighted by examples, of the metrics that all clients report as finite numbers."""
    rows = [{key: value for record in report.metric_records.values()
             for key, value in record.items()
             if isinstance(value, (int, float)) and math.isfinite(value)} for report in reports]
    common = set.intersection(*map(set, rows)) if rows else set()
    return {key: float(np.average([row[key] for row in rows],
                                  weights=[row[_EXAMPLES] for row in rows]))
            for key in sorted(common)}
