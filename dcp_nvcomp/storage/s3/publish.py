"""Replacing an object on S3 so that no attempt can do harm later.

An attempt that was never answered may have been done, and may still be done a while from now. If it lands after another
save has published and removed our files, it brings back metadata that names nothing. So every PUT says what it
replaces (If-Match, or If-None-Match if there is nothing): once this one, a repeated one or another save's has
landed, whatever else is still on its way is refused by the server.

Servers that do not know these conditions get plain PUTs, repeated only while the object is as it was.
"""

from __future__ import annotations

from typing import Final

from dcp_nvcomp.errors import ConcurrentSaveError
from dcp_nvcomp.storage.s3.client import answer_of
from dcp_nvcomp.storage.s3.object import S3Object

REFUSED_CONDITIONS: Final = ("NotImplemented", "InvalidArgument", "InvalidRequest")
_ROUNDS: Final = 20  # of other saves that are faster
_UNREADABLE: Final = "?"  # what may not be looked at is taken to be unchanged
# How an ETag is written: Ceph wants it bare and the standard quoted; then none at all.
_FORMS: Final = ("{}", '"{}"', None)


def refuses_conditions(error: BaseException) -> bool:
    """True if the server's response is that it does not know conditional writes."""
    status, code = answer_of(error)
    return status in (405, 501) or code in REFUSED_CONDITIONS


class Replacement:
    """One object and what is to be there."""

    def __init__(self, target: S3Object, data: bytes) -> None:
        self._target, self._data = target, data
        self._forms = list(_FORMS)
        self._before: str | None = None
        self._begun = False
        self._unsure = False  # whether an attempt had no answer

    async def attempt(self) -> None:
        """Try once, for `S3Client.perform`."""
        if not self._begun:
            self._before, self._begun = await self._etag(), True
        for _ in range(_ROUNDS):
            if self._unsure and await self._etag() != self._before:
                await self._must_be_ours()
                return
            if await self._put():
                return
            if self._forms[0] is None:  # conditions are refused: without them from here on
                continue
            now = await self._etag()
            if now == self._before:
                self._forms.pop(0)  # refused though nothing changed: not a form that this server understands
            elif self._unsure or await self._is_ours():
                await self._must_be_ours()
                return
            else:
                self._before = now  # another save was faster; this one comes after it
        raise self._refusal()

    async def _put(self) -> bool:
        """Return True if it was put, False if the server refused because of the condition."""
        form, before = self._forms[0], self._unsure
        condition: dict[str, str] = {}
        if form is not None and self._before is None:
            condition["IfNoneMatch"] = "*"
        elif form is not None and self._before != _UNREADABLE:
            condition["IfMatch"] = form.format(self._before)
        self._unsure = True
        try:
            await self._target.send("put_object", Body=self._data, **condition)
        except Exception as error:
            status, code = answer_of(error)
            if not condition or not (status == 412 or code == "NoSuchKey" or refuses_conditions(error)):
                raise
            if refuses_conditions(error):
                self._forms = [None]
            self._unsure = before
            return False
        return True

    async def _etag(self) -> str | None:
        try:
            found = await self._target.head()
        except Exception as error:
            if answer_of(error)[0] == 403:
                return _UNREADABLE
            raise
        return None if found is None else str(found.get("ETag")).strip('"')

    async def _must_be_ours(self) -> None:
        if not await self._is_ours():
            raise self._refusal()

    async def _is_ours(self) -> bool:
        # twice, as bits may flip in transit (reread.is_stored, but asynchronous)
        for _ in range(2):
            try:
                if await self._target.get() == self._data:
                    return True
            except Exception as error:
                if answer_of(error)[0] not in (403, 404):
                    raise
        return False

    def _refusal(self) -> ConcurrentSaveError:
        refusal = ConcurrentSaveError("Another save has published here at the same time.", path=self._target.location)
        refusal.outcome_unknown = True
        return refusal
