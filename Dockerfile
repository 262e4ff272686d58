# paceline serve, with the kernels of all instruction-set levels. See docs/deploying.md.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install --yes --no-install-recommends g++ \
  && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --constraint constraints.txt --wheel-dir /wheels '.[events]'

FROM python:${PYTHON}-slim-bookworm
# tini passes signals on, which the first process of a container would not get while a model loads.
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install --yes --no-install-recommends tini \
  && rm -rf /var/lib/apt/lists/* \
  && useradd --uid 10001 --create-home paceline \
  && mkdir /models /home/paceline/.cache && chown paceline /models /home/paceline/.cache
# The wheels are those of constraints.txt.
# hadolint ignore=DL3013
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
  pip install --no-cache-dir --no-index --find-links /wheels 'paceline[events]'
USER 10001
# Fails where the kernels were not compiled.
RUN paceline run embedded --prompt hi --max-tokens 4 --backend native
WORKDIR /models
VOLUME /models
EXPOSE 8000
HEALTHCHECK --start-period=10m --interval=10s --timeout=5s CMD \
  ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/readyz')"]
ENTRYPOINT ["tini", "--", "paceline"]
CMD ["serve", "embedded", "--host", "0.0.0.0"]
