"""Who takes part: the clients, their budgets in MACs and their shares of the data (paper 3.1)."""

from feast_tf.population.allocation import allocation_weights
from feast_tf.population.allocation import alpha_for_effective
from feast_tf.population.allocation import effective_alpha
from feast_tf.population.budgets import bounded_zipf
from feast_tf.population.budgets import bounded_zipf_counts
from feast_tf.population.budgets import budget_counts
from feast_tf.population.budgets import budgets_from_ranks
from feast_tf.population.budgets import draw_budgets
from feast_tf.population.budgets import parse_budgets
from feast_tf.population.clients import Client
from feast_tf.population.clients import build_population
from feast_tf.population.clients import sample_cohort
from feast_tf.population.partition import dirichlet_partition
