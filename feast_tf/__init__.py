"""FEAST on TensorFlow Federated: one elastic network for clients with different compute budgets.

Importing this package loads neither TensorFlow nor TensorFlow Federated; its subpackages load
what they need (see `feast_tf.versions`).
"""

__version__ = "0.1.0"
