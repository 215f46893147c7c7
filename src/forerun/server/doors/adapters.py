"""Routes for whoever has the admin key: load and unload LoRA adapters, sleep and wake up, under vLLM's names."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field, ValidationError

from forerun.core.errors import DamagedFile, InvalidInput, ModelNotFound, UnsupportedModel
from forerun.server.errors import ApiError, as_api_error, from_validation
from forerun.server.limits import must_be_admin
from forerun.server.schemas import Body, Name
from forerun.server.service import Service


class UnloadAdapter(Body):
    neutral: ClassVar[dict[str, Any]] = {"lora_int_id": None, "load_inplace": False}  # vLLM's
    lora_name: Annotated[Name, Field(min_length=1)]


class LoadAdapter(UnloadAdapter):
    lora_path: Name
    head_path: Name | None = None  # a head that drafts for this adapter's texts alone


def add_adapter_routes(app: FastAPI, service: Service) -> None:
    """The routes and bodies that vLLM has."""

    @app.post("/v1/load_lora_adapter", openapi_extra=_takes(LoadAdapter))
    async def load(request: Request) -> Response:
        body = await _admins_body(request, service, LoadAdapter)
        given = body.lora_path if body.head_path is None else f"{body.lora_path},head={body.head_path}"
        return await _changed(service.load_adapter(body.lora_name, given), body.lora_name, "loaded")

    @app.post("/v1/unload_lora_adapter", openapi_extra=_takes(UnloadAdapter))
    async def unload(request: Request) -> Response:
        body = await _admins_body(request, service, UnloadAdapter)
        return await _changed(service.unload_adapter(body.lora_name), body.lora_name, "unloaded")


def _takes(body: type[BaseModel]) -> dict[str, Any]:
    """What the body is, in the OpenAPI schema."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": body.model_json_schema()}}}}


async def _changed(work: Any, name: str, how: str) -> Response:
    try:
        await work
    except (DamagedFile, InvalidInput, ModelNotFound, UnsupportedModel) as error:  # of the folder that was named
        raise ApiError(400, str(error), param="lora_path") from None
    except Exception as error:
        raise as_api_error(error) from None
    return JSONResponse({"status": how, "lora_name": name})


async def _admins_body(request: Request, service: Service, kind: type[BaseModel]) -> Any:
    """What an admin has sent; nobody else is read."""
    must_be_admin(request.headers, service.settings.admin_key)
    try:
        return kind.model_validate(json.loads(await request.body()))
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False, include_input=False)) from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None


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
