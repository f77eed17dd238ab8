"""The admin calls about tenants' quotas."""

from collections.abc import AsyncIterator

from kilburn.v1 import admin_pb2 as admin
from memmgr.calls import Calls, Context, abort, tenant_for
from memmgr.core.quotas import Quota
from memmgr.engine import TooManyQuotasError
from memmgr.reasons import Code
from memmgr.session import QuotaRefusedError, Session


class QuotaCalls(Calls):
    """See the module."""

    async def SetQuota(self, request: admin.Quota, context: Context) -> admin.Quota:  # noqa: N802
        """Set one tenant's quota in place of the one before; one that says nothing takes it away."""
        if not request.tenant:
            await abort(context, Code.INVALID_VALUE, "tenant is empty; a quota is one tenant's", "tenant")
        await tenant_for(context, request.tenant)
        if request.max_blocks and request.guaranteed_blocks > request.max_blocks:
            message = f"guaranteed_blocks is {request.guaranteed_blocks}; no more can be than max_blocks, {request.max_blocks}"
            await abort(context, Code.INVALID_VALUE, message, "guaranteed_blocks")
        quota = Quota(request.tenant, request.max_blocks, request.guaranteed_blocks, request.max_running)

        def put(session: Session) -> admin.Quota:
            self.engine.set_quota(quota)
            return _message(quota, session)

        try:
            return await self.ask_session(context, put)
        except QuotaRefusedError as error:
            await abort(context, Code.TOO_MUCH_GUARANTEED, str(error))
        except TooManyQuotasError as error:
            await abort(context, Code.TOO_MANY_QUOTAS, str(error))

    async def ListQuotas(self, request: admin.ListQuotasRequest, context: Context) -> AsyncIterator[admin.Quota]:  # noqa: N802
        """All quotas, by tenant, with what is in use now."""

        def quotas() -> list[admin.Quota]:
            return [_message(quota, self.engine.session) for _, quota in sorted(self.engine.quotas.items())]

        for quota in await self.ask(context, quotas):
            yield quota


def _message(quota: Quota, session: Session | None) -> admin.Quota:
    return admin.Quota(
        tenant=quota.tenant,
        max_blocks=quota.max_blocks,
        guaranteed_blocks=quota.guaranteed_blocks,
        used_blocks=0 if session is None else session.scheduler.memory.quotas.used(quota.tenant),
        max_running=quota.max_running,
    )
