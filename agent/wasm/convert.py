"""ECDS resources with a remote Wasm module become such with a local file, before Envoy gets them.

What cannot be fetched becomes an RBAC filter of the same name that lets all through or nothing, as the plugin's failure
policy says. Source: istio/istio: pkg/wasm/convert.go.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from envoy.config.core.v3 import base_pb2, extension_pb2
from envoy.config.rbac.v3 import rbac_pb2
from envoy.extensions.filters.http.rbac.v3 import rbac_pb2 as http_rbac_pb2
from envoy.extensions.filters.http.wasm.v3 import wasm_pb2 as http_wasm_pb2
from envoy.extensions.filters.network.rbac.v3 import rbac_pb2 as network_rbac_pb2
from envoy.extensions.filters.network.wasm.v3 import wasm_pb2 as network_wasm_pb2
from envoy.extensions.wasm.v3 import wasm_pb2
from google.protobuf import json_format
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError
from udpa.type.v1 import typed_struct_pb2

from agent.metrics import Metrics
from agent.wasm.cache import ModuleCache, PullPolicy, Wanted
from agent.wasm.fetch import FetchError

log = logging.getLogger("wasm")

_PREFIX = "type.googleapis.com/"
_HTTP = _PREFIX + http_wasm_pb2.Wasm.DESCRIPTOR.full_name
_NETWORK = _PREFIX + network_wasm_pb2.Wasm.DESCRIPTOR.full_name
_STRUCT = _PREFIX + typed_struct_pb2.TypedStruct.DESCRIPTOR.full_name
_OWN = "ISTIO_META_"
_SECRET, _POLICY = f"{_OWN}WASM_IMAGE_PULL_SECRET", f"{_OWN}WASM_IMAGE_PULL_POLICY"
_VERSION = f"{_OWN}WASM_PLUGIN_RESOURCE_VERSION"
_POLICIES: dict[str, PullPolicy] = {"IfNotPresent": "IfNotPresent", "Always": "Always"}
DEFAULT_TIMEOUT = 5.0


class ConversionError(ValueError):
    """A response that Envoy must not get; the text is the NACK's."""


class _Failure(Exception):
    """A module that is not had; ``result`` is its label in the metrics."""

    def __init__(self, result: str, text: str) -> None:
        super().__init__(text)
        self.result = result


async def convert(resources: Sequence[AnyMessage], cache: ModuleCache, metrics: Metrics) -> list[AnyMessage]:
    """The resources as Envoy is to get them, all fetched at the same time.

    Raises:
        ConversionError: one of them is none, or has no code at all.
    """
    started = time.monotonic()
    results = await asyncio.gather(*(_one(r, cache, metrics) for r in resources), return_exceptions=True)
    metrics.wasm_config_conversion_duration.observe((time.monotonic() - started) * 1000)
    problems = [str(result) for result in results if isinstance(result, ConversionError)]
    if problems:
        raise ConversionError("; ".join(problems))
    out = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        out.append(result)
    return out


async def _one(resource: AnyMessage, cache: ModuleCache, metrics: Metrics) -> AnyMessage:
    count = metrics.wasm_config_conversion_count
    try:
        config, wasm = _read(resource)
    except ConversionError:
        count.add("unmarshal_failure")
        raise
    if wasm is None:
        count.add("no_remote_load")
        return resource
    plugin = wasm.config
    try:
        await _localise(config.name, plugin, cache)
    except _Failure as failure:
        count.add(failure.result)
        opened = _fails_open(plugin)
        log.error("cannot load Wasm module of %s, it %s: %s", config.name, "allows" if opened else "denies", failure)
        return _packed(config.name, _rbac(wasm, opened))
    count.add("success")
    return _packed(config.name, wasm)


def _read(resource: AnyMessage) -> tuple[Any, Any]:
    """(TypedExtensionConfig, its Wasm filter with remote code or None)."""
    config = extension_pb2.TypedExtensionConfig()
    try:
        if not resource.Unpack(config):
            raise ConversionError(f"failed to unmarshal extension config resource: it is a {resource.type_url}")
        if not config.HasField("typed_config"):
            raise ConversionError(f"typed extension config {config.name} does not contain any typed config")
        typed = config.typed_config
        if typed.type_url == _STRUCT:
            written = typed_struct_pb2.TypedStruct.FromString(typed.value)
            wasm = _filter_of(written.type_url)
            if wasm is not None:
                # what comes as a Struct has been through JSON
                data = json_format.MessageToDict(written.value)
                json_format.ParseDict(data, wasm, ignore_unknown_fields=True)
        else:
            wasm = _filter_of(typed.type_url)
            if wasm is not None:
                wasm.ParseFromString(typed.value)
    except (DecodeError, json_format.Error) as error:
        raise ConversionError(
            f"failed to unmarshal extension config resource {config.name}: {' '.join(str(error).split())}"
        ) from None
    if wasm is None:
        return config, None
    code = wasm.config.vm_config.code
    if code.HasField("remote"):
        return config, wasm
    if not code.HasField("local"):
        raise ConversionError(f"no remote and local load found in Wasm filter {config.name}")
    return config, None


def _filter_of(type_url: str) -> Any:
    if type_url == _HTTP:
        return http_wasm_pb2.Wasm()
    return network_wasm_pb2.Wasm() if type_url == _NETWORK else None


async def _localise(resource: str, plugin: Any, cache: ModuleCache) -> None:
    """Fetches the module and puts its file in the place of its URL."""
    vm = plugin.vm_config
    values = vm.environment_variables.key_values
    if _SECRET in values and not values[_SECRET]:
        raise _Failure("fetch_failure", f"cannot fetch Wasm module {plugin.name}: missing image pulling secret")
    secret, version = values.get(_SECRET, "").encode(), values.get(_VERSION, "")
    policy = _POLICIES.get(values.get(_POLICY, ""), "UNSPECIFIED_POLICY")
    # These are for the agent, not for Envoy or the module.
    for key in [key for key in values if key.startswith(_OWN)]:
        del values[key]
    if not values and not vm.environment_variables.host_env_keys:
        vm.ClearField("environment_variables")
    remote = vm.code.remote
    if not remote.HasField("http_uri"):
        raise _Failure("miss_remote_fetch_hint", f"wasm remote fetch of {plugin.name} does not have httpUri specified")
    uri = remote.http_uri
    timeout = uri.timeout.ToNanoseconds() / 1e9 if uri.HasField("timeout") else DEFAULT_TIMEOUT
    checksum = "" if remote.sha256 == "nil" else remote.sha256
    try:
        path = await cache.get(Wanted(uri.uri, checksum, resource, version, timeout, policy, secret))
    except FetchError as error:
        raise _Failure("fetch_failure", f"cannot fetch Wasm module {uri.uri}: {error}") from None
    vm.code.CopyFrom(base_pb2.AsyncDataSource(local=base_pb2.DataSource(filename=path)))


def _fails_open(plugin: Any) -> bool:
    if plugin.failure_policy != wasm_pb2.FailurePolicy.UNSPECIFIED:
        return bool(plugin.failure_policy == wasm_pb2.FailurePolicy.FAIL_OPEN)
    return bool(plugin.fail_open)


def _rbac(wasm: Any, opened: bool) -> Any:
    """A filter that lets all through (no rules), or nothing (rules of which none matches)."""
    prefix = "wasm-default-allow" if opened else "wasm-default-deny"
    rules = None if opened else rbac_pb2.RBAC()
    if isinstance(wasm, http_wasm_pb2.Wasm):
        return http_rbac_pb2.RBAC(rules=rules, rules_stat_prefix=prefix)
    return network_rbac_pb2.RBAC(rules=rules, stat_prefix=prefix)


def _packed(name: str, message: Any) -> AnyMessage:
    config = extension_pb2.TypedExtensionConfig(name=name)
    config.typed_config.Pack(message)
    out = AnyMessage()
    out.Pack(config)
    return out
