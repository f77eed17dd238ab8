"""The admin calls about tenants' quotas."""

from collections.abc import AsyncIterator

import grpc

from kilburn.limits import MAX_NAME_CHARACTERS
from kilburn.v1 import admin_pb2 as admin
from memmgr.calls import Calls, Context, abort
from memmgr.core.quotas import Quota
from memmgr.engine import TooManyQuotasError
from memmgr.session import QuotaRefusedError, Session


class QuotaCalls(Calls):
    """See the module."""

    async def SetQuota(self, request: admin.Quota, context: Context) -> admin.Quota:  # noqa: N802
        """Set one tenant's quota in place of the one before; one that says nothing takes it away."""
        wrong = _fault(request)
        if wrong:
            await abort(context, grpc.StatusCode.INVALID_ARGUMENT, wrong)
        quota = Quota(request.tenant, request.max_blocks, request.guaranteed_blocks, request.max_running)

        def put(session: Session) -> admin.Quota:
            self.engine.set_quota(quota)
            return _message(quota, session)

        try:
            return await self.ask_session(context, put)
        except QuotaRefusedError as error:
            await abort(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except TooManyQuotasError as error:
            await abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))

    async def ListQuotas(self, request: admin.ListQuotasRequest, context: Context) -> AsyncIterator[admin.Quota]:  # noqa: N802
        """All quotas, by tenant, with what is in use now."""

        def quotas() -> list[admin.Quota]:
            return [_message(quota, self.engine.session) for _, quota in sorted(self.engine.quotas.items())]

        for quota in await self.ask(context, quotas):
            yield quota


def _fault(quota: admin.Quota) -> str:
    """Return what is wrong with a quota; empty where nothing is."""
    if not quota.tenant:
        return "tenant is empty; a quota is one tenant's"
    if len(quota.tenant) > MAX_NAME_CHARACTERS:
        return f"tenant has {len(quota.tenant)} characters; at most {MAX_NAME_CHARACTERS} are taken"
    if quota.max_blocks and quota.guaranteed_blocks > quota.max_blocks:
        return f"guaranteed_blocks is {quota.guaranteed_blocks} and max_blocks {quota.max_blocks}; no more can be guaranteed"
    return ""


def _message(quota: Quota, session: Session | None) -> admin.Quota:
    return admin.Quota(
        tenant=quota.tenant,
        max_blocks=quota.max_blocks,
        guaranteed_blocks=quota.guaranteed_blocks,
        used_blocks=0 if session is None else session.scheduler.memory.quotas.used(quota.tenant),
        max_running=quota.max_running,
    )
