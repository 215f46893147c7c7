"""A drop-in for transformers users: `forerun.wrap(model).generate(...)`."""

from forerun.dropin.wrapped import Wrapped as Wrapped
from forerun.dropin.wrapped import wrap as wrap
