"""NO_FORMS: the menu of look-ups alone. Plain decoding is all that they are compared with."""

from __future__ import annotations

from forerun.core.offer import Form


class _NoForms:
    """Implements forerun.core.offer.Menu."""

    forms: tuple[Form, ...] = ()

    def seconds(self, form: Form, batch: int) -> float:
        return 0.0

    def rows(self, form: Form, batch: int) -> int:
        return batch * (1 + form.nodes)

    def expected(self, form: Form) -> float:
        return 0.0


NO_FORMS = _NoForms()
