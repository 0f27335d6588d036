// Who is signed in, and which pages and buttons that person has.
import { api } from "./api.js";

let asked = null;

/** Return the caller: `{user, tenant, scopes}`. It is asked for once. */
export function readCaller() {
  asked ??= api.caller().catch((error) => {
    asked = null;
    throw error;
  });
  return asked;
}

/** Return whether a caller may see what needs a scope, and perhaps a key without a tenant: `{scope, allTenants}`. */
export function permits(caller, needs) {
  return !needs || (caller.scopes.includes(needs.scope) && !(needs.allTenants && caller.tenant !== null));
}
