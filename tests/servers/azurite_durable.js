// Lets Azurite answer a write when it is on disk. By itself it saves its list of blobs every five seconds, and forgets
// when it is killed what it has confirmed since, which Azure does not.
//
//     node -r azurite_durable.js .../azurite/dist/src/blob/main.js
"use strict";
const http = require("http");
const path = require("path");
const Loki = require(require.resolve("lokijs", { paths: [path.dirname(process.argv[1])] }));

const databases = new Set();
const save = Loki.prototype.saveDatabase;
Loki.prototype.saveDatabase = function (...given) {
  databases.add(this);
  return save.apply(this, given);
};

const changes = (request) =>
  request && ["PUT", "DELETE"].includes(request.method) && !request.url.includes("comp=block&");
const end = http.ServerResponse.prototype.end;
http.ServerResponse.prototype.end = function (...given) {
  if (!changes(this.req) || this.statusCode >= 300) return end.apply(this, given);
  const saved = [...databases].map((database) => new Promise((done) => save.call(database, done)));
  Promise.all(saved).then(() => end.apply(this, given));
  return this;
};
