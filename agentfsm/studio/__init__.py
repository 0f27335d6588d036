"""The studio: pages to see runs and steer them. They are files that a browser reads, and a client of the gateway."""

from agentfsm.studio.page_files import StudioFiles

__all__ = ["StudioFiles"]
