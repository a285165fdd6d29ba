"""Pictures for training and testing: digits, CIFAR-10/100, CINIC-10, TinyImageNet (paper 4.1)."""

from feast_tf.datasets.loading import NAMES
from feast_tf.datasets.loading import load
from feast_tf.datasets.sizes import class_counts
from feast_tf.datasets.splits import Dataset
from feast_tf.datasets.splits import Split
from feast_tf.datasets.splits import stratified_split
