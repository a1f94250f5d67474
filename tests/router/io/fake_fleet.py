"""A fleet that only notes who joins and leaves."""

from dataclasses import dataclass, field

from vertumnus_router.io.fleet import AlreadyThere, Role


@dataclass
class FakeFleet:
    members: dict[str, Role] = field(default_factory=dict)
    #: in order, "+URL" and "-URL"
    log: list[str] = field(default_factory=list)

    def join(self, url: str, role: Role = Role.WORKER) -> bool:
        if url in self.members:
            if self.members[url] is not role:
                raise AlreadyThere(url)
            return False
        self.members[url] = role
        self.log.append(f"+{url}")
        return True

    def leave(self, url: str) -> bool:
        self.log.append(f"-{url}")
        return self.members.pop(url, None) is not None
