"""Routes that free the memory of the engine and load it again, under vLLM's names, for whoever has the admin key."""

from __future__ import annotations

from fastapi import FastAPI, Request

from forerun.core.errors import UnsupportedModel
from forerun.server.errors import ApiError
from forerun.server.limits import must_be_admin
from forerun.server.service import Service


def add_sleep_routes(app: FastAPI, service: Service) -> None:
    """All answer whether the server sleeps."""

    def state(request: Request) -> dict[str, bool]:
        must_be_admin(request.headers, service.settings.admin_key)
        return {"is_sleeping": service.sleeping}

    @app.get("/is_sleeping")
    async def is_sleeping(request: Request) -> dict[str, bool]:
        return state(request)

    @app.post("/sleep")
    async def sleep(request: Request) -> dict[str, bool]:
        state(request)
        try:
            await service.sleep()
        except UnsupportedModel as error:
            raise ApiError(400, str(error)) from None
        return state(request)

    @app.post("/wake_up")
    async def wake_up(request: Request) -> dict[str, bool]:
        state(request)
        await service.wake_up()
        return state(request)
