"""A drop-in for transformers users: `forerun.wrap(model).generate(...)`."""

from forerun.api.dropin.wrapped import Wrapped as Wrapped
from forerun.api.dropin.wrapped import wrap as wrap
