"""Tasks: the Auto class, the loss of every example, and the metrics."""

from training.tasks.base import Task
from training.tasks.causal_lm import CausalLM
from training.tasks.classification import Classification, ImageClassification, Regression, names_of_classes, stated_labels
from training.tasks.loading import base_model_name, from_config, read_config
from training.tasks.token_classification import TokenClassification
from training.tasks.translation import Translation

__all__ = [
    "CausalLM",
    "Classification",
    "ImageClassification",
    "Regression",
    "Task",
    "TokenClassification",
    "Translation",
    "base_model_name",
    "from_config",
    "names_of_classes",
    "read_config",
    "stated_labels",
]
